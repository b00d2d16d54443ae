"""Locks on files, which the kernel releases when their holder ends."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobkit.errors import UsageError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold a lock on a file, made where it is absent and never changed.

    Raises BlockingIOError where another process holds it and wait is False, UsageError where the
    file system has no locks, and OSError for a link, which could lead to a file of one's own.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:  # another user's, in a shared folder: to lock it reading is enough
        handle = os.open(path, flags | os.O_RDONLY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise UsageError(
                f"{path.parent}: its file system has no locks (flock): choose another folder with "
                "JOBKIT_LOGS for logs, or JOBKIT_DATA_DIR for data"
            ) from None
        yield
    finally:
        os.close(handle)
