"""Locks and ports, so that two commands at once never meet.

A lock is a file in a folder of this user's own, so that nobody else can take it: the kernel frees
it when its holder ends, however it ends. A block of ports is for all users of the machine, and its
lock is a Unix socket with a name and no file ("abstract"): who wants to disturb takes the ports.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minicluster.errors import ClusterError, UsageError
from minicluster.layout import PORTS_PER_BLOCK, Layout, Ports

# Below Linux's usual ephemeral range, and below 20000, where training jobs take their ports.
FIRST_BASE = 7000
BLOCKS = 32


def _folders() -> list[Path]:
    """Where locks may lie, the best place first: those in which others cannot make it before us."""
    user = os.geteuid()
    run = Path("/run") if user == 0 else Path(f"/run/user/{user}")
    home = Path(os.environ.get("HOME") or "/nonexistent")
    return [
        run / "jobkit-minicluster-locks",
        Path(f"/tmp/jobkit-minicluster-locks-{user}"),
        home / ".jobkit-minicluster-locks",
    ]


def lock_folder() -> Path:
    """A folder of this user's own, made where it is absent; UsageError where there can be none."""
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
        except OSError:
            continue
        closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
        if closed and status.st_uid == os.geteuid():
            return folder
    raise UsageError(f"no place for locks: make one of {', '.join(map(str, _folders()))}")


def _try_file(name: str) -> int | None:
    """A handle that holds the lock of this name until it is closed; None where another has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(lock_folder() / name, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _try_socket(name: str) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0jobkit-minicluster-{name}")
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


@contextmanager
def held(name: str, busy_message: str) -> Iterator[None]:
    """Hold the lock of this name, or ClusterError at once where another command has it."""
    if (lock := _try_file(name)) is None:
        raise ClusterError(busy_message)
    try:
        yield
    finally:
        os.close(lock)


def folder_name(layout: Layout) -> str:
    return f"folder-{hashlib.sha256(bytes(layout.root)).hexdigest()[:32]}"


def taken_port(ports: list[int]) -> int | None:
    """The first of the ports that cannot be listened on."""
    for port in ports:
        with socket.socket() as probe:
            # As the daemons do: a connection that has just ended is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                probe.listen()
            except OSError:
                return port
    return None


@contextmanager
def port_block(layout: Layout, nodes: int, wanted: int | None) -> Iterator[Ports]:
    """A block of free ports, held against another `up` until the daemons listen on them."""
    if wanted is not None:
        if (lock := _try_socket(f"ports-{wanted}")) is None:
            raise ClusterError(f"--port {wanted}: another `up` is taking it; try again")
        with lock:
            yield _wanted_block(wanted, nodes)
        return
    start = int(layout.tag, 16)  # clusters in different folders begin at different places
    for step in range(BLOCKS):
        base = FIRST_BASE + (start + step) % BLOCKS * PORTS_PER_BLOCK
        if (lock := _try_socket(f"ports-{base}")) is None:
            continue
        with lock:
            if taken_port(Ports(base).used(nodes)) is None:
                yield Ports(base)
                return
    last = FIRST_BASE + BLOCKS * PORTS_PER_BLOCK - 1
    raise ClusterError(f"no free block of ports from {FIRST_BASE} to {last}; choose one by --port")


def _wanted_block(base: int, nodes: int) -> Ports:
    most = 65536 - PORTS_PER_BLOCK
    if not 1024 <= base <= most:
        raise UsageError(f"--port {base}: must be from 1024 to {most}")
    taken = taken_port(Ports(base).used(nodes))
    if taken is not None:
        raise ClusterError(
            f"--port {base}: port {taken} of its block is in use; choose another, or leave it out"
        )
    return Ports(base)
