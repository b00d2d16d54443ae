"""Standard input, output and error that end no command, whatever it was started with.

A reader that goes away (`... | head`), a terminal that closes, a full disk, streams that were
closed at the start (`>&-`): the command finishes its work, and what it prints is lost from there.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any

_GONE = (errno.EPIPE, errno.EIO)  # nobody reads any more: a pipe's reader, or the terminal, ended
_lost: Callable[[], None] | None = None


class _Stream(io.RawIOBase):
    """A file handle to write to; after an error all output to it is dropped."""

    def __init__(self, handle: int, on_error: Callable[[], None]) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._handle, self._on_error = handle, on_error

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: Any, /) -> int:
        """Write some of the data, or drop all of it; return how many bytes were taken."""
        while self.error is None:
            try:
                return os.write(self._handle, data)
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select([], [self._handle], [])
            except OSError as error:
                self.error = error
                self._on_error()
        return len(data)


_opened: dict[int, _Stream] = {}


def protect() -> None:
    """Open what is closed of file handles 0 to 2; let no error of output or encoding end us.

    Streams that were replaced before (a test's, a notebook's) are left as they are.
    """
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            # Otherwise the next file that is opened would get this number, and what somebody
            # prints would end in it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = _protected(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _protected(sys.stderr, sys.__stderr__, 2)


def _protected(stream: Any, original: Any, handle: int) -> Any:
    """The stream, or one in its place that raises no error."""
    if stream is not original or handle in _opened:
        return stream
    raw = _opened[handle] = _Stream(handle, _say_lost if handle == 1 else lambda: None)
    lines = stream is None or stream.line_buffering or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",  # a path may have bytes, and text letters, that it cannot show
        line_buffering=lines,
        write_through=handle == 2,
    )


def reader_gone() -> bool:
    """Whether nobody reads standard output any more."""
    if 1 not in _opened:
        return False
    poll = select.poll()
    poll.register(1, 0)  # an error is reported unasked
    ended = any(events & select.POLLERR for _, events in poll.poll(0))
    return ended or _opened[1].error is not None


def when_lost(text: str) -> None:
    """Print a line to standard error as soon as standard output takes no more."""
    global _lost
    _lost = lambda: print(f"jobkit: note: {text}", file=sys.stderr, flush=True)  # noqa: E731
    if 1 in _opened and _opened[1].error is not None:
        _say_lost()


def _say_lost() -> None:
    global _lost
    say, _lost = _lost, None
    if say is not None:
        say()


def finish(code: int) -> int:
    """Flush what was printed; return the exit code.

    0 becomes 1 where standard output could not be written, unless its reader had enough of it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    error = _opened[1].error if 1 in _opened else None
    if error is None or error.errno in _GONE:
        return code
    print(f"jobkit: error: standard output: {error.strerror}: it is cut off", file=sys.stderr)
    return code or 1
