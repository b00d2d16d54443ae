"""Files: opened where somebody else may have put a link or a FIFO, written whole, locked; and the
same work for each of many, by as many processes as there are cores."""

import errno
import fcntl
import io
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jobkit.errors import UsageError, nearest

MAX_TEXT = 16 << 20  # bytes of a file of settings or state: a larger one is none
MAX_TOML = 1 << 20  # its reader takes a second for that much


def open_regular(
    path: str | Path, max_bytes: int | None = None, within: Path | None = None, follow: bool = True
) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for all else, or where it is larger.

    A FIFO would wait forever, and a device such as /dev/zero never ends. Links are followed where
    follow says so: what they lead to must lie within a folder where one is named.
    """
    # Without O_NONBLOCK the open of a FIFO would itself wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            error = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            what = os.strerror(error) if error == errno.EISDIR else "not a regular file"
            raise OSError(error, what, str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
        if within is not None and not _is_within(handle, within):
            raise OSError(errno.ELOOP, f"a link that leads out of {within.name}", str(path))
        return io.BufferedReader(io.FileIO(handle, "rb"))
    except BaseException:
        os.close(handle)
        raise


def _is_within(handle: int, folder: Path) -> bool:
    """Whether the file that was opened lies in a folder, whatever a link says by now."""
    real = Path(f"/proc/self/fd/{handle}").readlink()  # by the kernel: no second look at a link
    # It has no link in it. A folder that it begins with is therefore the real one, as most are.
    return str(real).startswith(f"{folder}/") or real.is_relative_to(os.path.realpath(folder))


def append_to(path: str | Path) -> io.FileIO:
    """Open a file to append to, unbuffered; it is made where it is absent.

    Raises OSError for a link or a file with a second name (a hard link), as what is written would
    end up elsewhere, and for what is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link in the place of a file", str(path)) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "a file that has another name (a hard link)", str(path))
        return io.FileIO(handle, "ab")
    except BaseException:
        os.close(handle)
        raise


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
        os.scandir(folder).close()
        os.scandir(f"{folder}/.").close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_regular(path: str | Path, max_bytes: int = MAX_TEXT, follow: bool = True) -> bytes:
    """The bytes of a regular file. Raises OSError for all else, or where it is larger.

    follow: a link to one is read too. In a study that somebody handed over it could lead to any
    file of this user's.
    """
    with open_regular(path, max_bytes, follow=follow) as file:
        # As much as there is: for thousands of small files more memory would take most of the time.
        size = os.fstat(file.fileno()).st_size or max_bytes  # of a file of /proc it is 0
        if len(content := file.read(size + 1)) > size:
            content += file.read(max_bytes)  # it has grown since
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_text(path: str | Path, max_bytes: int = MAX_TEXT) -> str:
    """The text of a regular file, in UTF-8. Raises OSError, or UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode("utf-8")


def read_toml(path: Path, known: Iterable[str] = ()) -> dict[str, Any]:
    """The table of a TOML file; known: its keys, if there are no others.

    Raises UsageError for a file that cannot be read, and for a key that is not known.
    """
    try:
        table = load_toml(read_text(path, MAX_TOML))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for key in table:
        if (keys := tuple(known)) and key not in keys:
            listed = f" (known: {', '.join(keys)})"
            raise UsageError(f"{path}: unknown key '{key}'{nearest(key, keys) or listed}")
    return table


def load_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError for all else."""
    import tomllib  # here, because the payload imports this file on Python 3.10 too

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold a lock on a file, made where it is absent and never changed.

    Raises BlockingIOError where another process holds it and wait is False, and OSError for a link,
    which could lead to a file of one's own, and for a file system without locks.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:  # another user's, in a shared folder: to lock it reading is enough
        handle = os.open(path, flags | os.O_RDONLY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


SHARE = 100  # small files to be read: the least for a further process
_MAX_WORKERS = 8  # a login node has other users
_INHERITED: list[Any] = []  # of a worker: the work and the items, which are not pickled

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Sequence[T], share: int | None = None) -> Iterator[R]:
    """work(item) for each item, in order; of many items each forked process takes a part.

    share: the least number of items that is worth a further process; None: SHARE. Where a process
    fails, the rest is done here, where it may raise.
    """
    share, done = share or SHARE, 0
    workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS, len(items) // share)
    if workers > 1 and threading.active_count() == 1:  # a lock that a thread holds stays locked
        import multiprocessing  # here, as few need it
        from concurrent.futures import ProcessPoolExecutor

        fork = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(workers, fork, _begin_worker, (work, items)) as pool:
                for result in pool.map(_do, range(len(items)), chunksize=max(1, share // 5)):
                    yield result
                    done += 1
        except Exception:
            pass
    yield from map(work, items[done:])


def _begin_worker(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    import ctypes

    _INHERITED[:] = work, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the reader gets it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the reader


def _do(index: int) -> Any:
    work, items = _INHERITED
    return work(items[index])
