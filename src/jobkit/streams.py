"""Standard output and error that end no command and no training when they cannot be written.

A reader leaves (`... | head`), a terminal closes, a disk is full: what is printed is lost from
there, and the work goes on.
"""

import errno
import io
import select
import sys
from typing import Any


class _Lossy(io.FileIO):
    """A file handle to write to; after an error all output to it is dropped."""

    lost = False

    def write(self, data: Any, /) -> int:
        """Write some of the data, or drop all of it; return how many bytes were taken."""
        try:
            while not self.lost:
                if (taken := super().write(data)) is not None:
                    return taken
                select.select([], [self], [])  # another program made the terminal non-blocking
        except OSError as error:
            self.lost = True
            if error.errno not in (errno.EPIPE, errno.EIO) and self.fileno() == 1:
                print(f"jobkit: note: standard output: {error.strerror}", file=sys.stderr)
        return len(data)


def protect() -> None:
    """Let no error of output or encoding end this process.

    Streams that were replaced before (a test's, a notebook's) or closed (>&-) are left as they are.
    """
    for handle, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__") or stream.closed:
            continue
        protected = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(handle, "wb", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a path may have bytes, and text letters, not to be shown
            line_buffering=stream.line_buffering,
            write_through=handle == 2,
        )
        stream.flush()
        setattr(sys, name, protected)


def lost() -> bool:
    """Whether standard output takes no more."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Lossy) and raw.lost
