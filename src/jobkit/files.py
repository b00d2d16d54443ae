"""Files: opened where somebody else may have put a link or a FIFO, and locked."""

import errno
import fcntl
import io
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from jobkit.errors import UsageError, nearest

MAX_TEXT = 16 << 20  # bytes of a file of settings or state: a larger one is none
MAX_TOML = 1 << 20  # its reader takes a second for that much
MAX_LOG = 4 << 30  # bytes of a log
_TAIL_BYTES = 8 << 20  # of a log of any length, which so costs little memory
_MAX_TAIL_LINES = 100_000  # each takes memory of its own, also an empty one
_MAX_TAIL_LINE = 4096  # bytes of a line that are looked at


def open_regular(
    path: str | Path, max_bytes: int | None = None, within: Path | None = None, follow: bool = True
) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for all else, or where it is larger.

    A FIFO would wait forever, and a device such as /dev/zero never ends. Links are followed where
    follow says so: what they lead to must lie within a folder where one is named.
    """
    file = _open(path, "rb", 0 if follow else os.O_NOFOLLOW)
    if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
        _refuse(file, errno.EFBIG, f"larger than {max_bytes:,} bytes")
    if within is not None and not _is_within(file.fileno(), within):
        _refuse(file, errno.ELOOP, f"a link that leads out of {within.name}")
    return io.BufferedReader(file)


def _open(path: str | Path, mode: str, flags: int) -> io.FileIO:
    """Open a regular file, unbuffered; raises OSError for all else."""
    # Without O_NONBLOCK the open of a FIFO would itself wait for its other end.
    flags |= os.O_NONBLOCK
    file = io.FileIO(path, mode, opener=lambda name, of_mode: os.open(name, of_mode | flags, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        _refuse(file, errno.EINVAL, "not a regular file")
    return file


def _refuse(file: io.FileIO, number: int, why: str) -> NoReturn:
    file.close()
    raise OSError(number, why, str(file.name))


def _is_within(handle: int, folder: Path) -> bool:
    """Whether the file that was opened lies in a folder, whatever a link says by now."""
    real = Path(f"/proc/self/fd/{handle}").readlink()  # by the kernel: no second look at a link
    # It has no link in it. A folder that it begins with is therefore the real one, as most are.
    return str(real).startswith(f"{folder}/") or real.is_relative_to(os.path.realpath(folder))


def append_to(path: str | Path) -> io.FileIO:
    """Open a file to append to, unbuffered; it is made where it is absent.

    Raises OSError for a link, through which one writes elsewhere, and for what is no regular file.
    """
    return _open(path, "ab", os.O_NOFOLLOW)


def is_there(path: Path) -> bool:
    """Whether something of this name can be seen: False also where its folder is closed to us."""
    return os.path.exists(path)  # noqa: PTH110, as Path.exists raises there


def is_regular(path: Path) -> bool:
    """Whether a regular file of this name can be seen."""
    return os.path.isfile(path)  # noqa: PTH113


def file_names(folder: Path) -> list[str]:
    """The names in a folder; none where it is absent or cannot be read."""
    try:
        return [entry.name for entry in os.scandir(folder)]  # a path for each would be slow
    except OSError:
        return []


def closed(folder: Path) -> str:
    """Why a folder that is there cannot be listed, or its files not opened; empty where they can.

    The name "." can be found only with the right to enter the folder.
    """
    try:
        for path in (folder, f"{folder}/."):
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_regular(path: str | Path, max_bytes: int = MAX_TEXT, follow: bool = True) -> bytes:
    """The bytes of a regular file. Raises OSError for all else, or where it is larger.

    follow: a link to one is read too; in another's study it could lead to any file of this user's.
    """
    with open_regular(path, max_bytes, follow=follow) as file:
        return file.read()


def read_text(path: str | Path, max_bytes: int = MAX_TEXT) -> str:
    """The text of a regular file, in UTF-8. Raises OSError, or UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode("utf-8")


def read_tail(log: Path, size: int = _TAIL_BYTES, within: Path | None = None) -> list[str]:
    """Read the last lines of a log, at most size bytes of them; empty without a log.

    within: the folder out of which no link may lead, as it could to any file of this user's; None:
    the one above the log's.
    """
    content, begin = b"", 0
    with suppress(OSError), open_regular(log, within=within or log.parent.parent) as stream:
        begin = stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
        content = stream.read(size)
    parts = content.rsplit(b"\n", _MAX_TAIL_LINES) if content else []
    if begin or len(parts) > _MAX_TAIL_LINES:  # the first is what is left, or may be half
        del parts[:1]
    return [part[-_MAX_TAIL_LINE:].decode("utf-8", "replace") for part in parts]


def read_toml(path: Path, known: Iterable[str] = ()) -> dict[str, Any]:
    """The table of a TOML file; known: its keys, if there are no others.

    Raises UsageError for a file that cannot be read, and for a key that is not known.
    """
    import tomllib  # here, because the payload imports this file on Python 3.10 too

    try:
        table = tomllib.loads(read_text(path, MAX_TOML))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for key in table:
        if (keys := tuple(known)) and key not in keys:
            listed = f" (known: {', '.join(keys)})"
            raise UsageError(f"{path}: unknown key '{key}'{nearest(key, keys) or listed}")
    return table


def written_ago_s(files: Iterable[Path]) -> float | None:
    """Seconds since one of the files was last written; None where none can be seen."""
    times = []
    for file in files:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return time.time() - max(times) if times else None


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold a lock on a file, made where it is absent and never changed.

    Raises BlockingIOError where another process holds it and wait is False, and OSError for a link,
    which could lead to a file of one's own, and for a file system without locks.
    """
    try:
        file = append_to(path)
    except PermissionError:  # another user's, in a shared folder: to lock it reading is enough
        file = _open(path, "rb", os.O_NOFOLLOW)
    with file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
