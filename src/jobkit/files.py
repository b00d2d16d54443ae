"""Opening files that somebody else may have made, or put a link in the place of."""

import errno
import io
import os
import stat
from pathlib import Path

_STALE_TRIES = 3
MOST_TEXT = 16 << 20  # bytes of a file of settings or state: a larger one is none


def open_regular(path: str | Path, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for all else, or where it is larger.

    A FIFO would wait forever, and a device such as /dev/zero never ends. Links are followed:
    what they lead to must be a regular file as well.
    """
    # Without O_NONBLOCK the open of a FIFO would itself wait for its other end.
    handle = _open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
        return io.BufferedReader(io.FileIO(handle, "rb"))
    except BaseException:
        os.close(handle)
        raise


def _open(path: str | Path, flags: int) -> int:
    """Open a file; again where a network file system had an old handle of it (ESTALE)."""
    for _ in range(_STALE_TRIES):
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return os.open(path, flags)


def is_there(path: Path) -> bool:
    """Whether something of this name can be seen: False also where its folder is closed to us."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def is_regular(path: Path) -> bool:
    """Whether a regular file of this name can be seen."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def read_end(path: Path, size: int) -> bytes:
    """The last bytes of a regular file; none where it is absent or cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read()
    except OSError:
        return b""


def read_regular(path: str | Path, max_bytes: int = MOST_TEXT) -> bytes:
    """The bytes of a regular file. Raises OSError for all else, or where it is larger."""
    with open_regular(path, max_bytes) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it has grown since it was opened
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_text(path: str | Path, max_bytes: int = MOST_TEXT) -> str:
    """The text of a regular file, in UTF-8. Raises OSError, or UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode("utf-8")
