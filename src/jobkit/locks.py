"""Locks on files, also where the file system has none (NFS without its lock service)."""

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobkit.files import read_regular
from jobkit.processes import is_alive, pid_namespace, process_start

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_POLL_S = 0.25
# How long to wait for an owner on another machine, where nobody can tell whether it still lives.
MOST_WAIT_S = 900.0
_said: set[Path] = set()


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock on a file, made where it is absent and never changed; yield whether it is held.

    Where the file system has no locks, the file PATH.owner, which is removed at the end, names the
    process that holds it; one of a process of this machine that has ended is taken over. False is
    yielded only after a long wait for a process of another machine.
    Raises BlockingIOError where another process holds it and wait is False, and OSError for a
    link, which could lead to a file of one's own.
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
            with _owned(owner_file(path), wait) as held:
                yield held
        else:
            yield True
    finally:
        os.close(handle)


def owner_file(path: Path) -> Path:
    """The file that stands for a lock where the file system has none."""
    return path.with_name(path.name + ".owner")


@contextmanager
def _owned(owner: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock by a file that names this process; yield whether it is held."""
    if owner.parent not in _said:
        _said.add(owner.parent)
        print(
            f"jobkit: note: {owner.parent}: the file system has no locks; {owner.name} is used "
            "instead",
            file=sys.stderr,
            flush=True,
        )
    pid = os.getpid()
    record = {"pid": pid, "pid_start": process_start(pid), "host": socket.gethostname()}
    of_all = {**record, "pid_ns": pid_namespace(), "key": secrets.token_hex(8)}
    own = json.dumps(of_all).encode()
    deadline = time.monotonic() + (MOST_WAIT_S if wait else 0.0)
    while not (held := _take(owner, own)):
        if not wait:
            raise BlockingIOError(errno.EAGAIN, "held by another process", str(owner))
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    try:
        yield held
    finally:
        if held and _content(owner) == own:
            owner.unlink(missing_ok=True)


def _take(owner: Path, own: bytes) -> bool:
    """Whether the owner's file could be made, once one of a process that has ended is removed."""
    before = _content(owner)
    if before is not None and _has_ended(before):
        _remove(owner, before)
    beside = owner.with_name(f".{owner.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(own)
        # The link is made at once, with all of its content, and by one process only.
        os.link(beside, owner)
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)
    return True


def _remove(owner: Path, stale: bytes) -> None:
    """Remove an owner's file if it still has this content: another process may be first."""
    aside = owner.with_name(f".{owner.name}.{secrets.token_hex(4)}")
    try:
        owner.rename(aside)
    except FileNotFoundError:
        return
    if _content(aside) != stale:
        os.link(aside, owner)  # it was taken over in between: give it back
    aside.unlink(missing_ok=True)


def _content(path: Path) -> bytes | None:
    """The content of an owner's file; None where there is none."""
    try:
        return read_regular(path, 4096)
    except OSError:
        return None


def _has_ended(content: bytes) -> bool:
    """Whether an owner's file names a process of this machine that has ended, or none at all."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return True
    if not isinstance(record, dict) or type(record.get("pid")) is not int:
        return True
    return is_alive(record) is False
