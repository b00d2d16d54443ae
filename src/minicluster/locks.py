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

from minicluster.layout import PORTS_PER_BLOCK, ClusterError, Layout, Ports, UsageError

# Below Linux's usual ephemeral range, and below 20000, where training jobs take their ports.
FIRST_BASE = 7000
BLOCKS = 32


def _folders() -> list[Path]:
    """Where locks may lie, the best place first: those in which others cannot make it before us."""
    user = os.geteuid()
    run = Path("/run") if user == 0 else Path(f"/run/user/{user}")
    places = [run / "jobkit-minicluster-locks", Path(f"/tmp/jobkit-minicluster-locks-{user}")]
    return [*places, Path(os.environ.get("HOME") or "/nonexistent") / ".jobkit-minicluster-locks"]


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


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the lock of the cluster's folder; ClusterError at once where another command has it."""
    name = f"folder-{hashlib.sha256(bytes(layout.root)).hexdigest()[:32]}"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(lock_folder() / name, flags, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"{layout.root}: another minicluster command is using this folder; "
                "wait for it, then try again"
            ) from None
        yield
    finally:
        os.close(handle)


def _lock_ports(base: int) -> socket.socket | None:
    """A socket that holds the block until it is closed; None where another `up` has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0jobkit-minicluster-ports-{base}")
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


def _taken_port(ports: list[int]) -> int | None:
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
    if wanted is not None and not 1024 <= wanted <= 65536 - PORTS_PER_BLOCK:
        raise UsageError(f"--port {wanted}: must be from 1024 to {65536 - PORTS_PER_BLOCK}")
    start = int(layout.tag, 16)  # clusters in different folders begin at different places
    steps = [(start + step) % BLOCKS for step in range(BLOCKS)]
    bases = [wanted] if wanted else [FIRST_BASE + step * PORTS_PER_BLOCK for step in steps]
    why = "another `up` is taking it; try again"
    for base in bases:
        if (lock := _lock_ports(base)) is None:
            continue
        with lock:
            if (taken := _taken_port(Ports(base).used(nodes))) is None:
                yield Ports(base)
                return
            why = f"port {taken} of its block is in use; choose another, or leave it out"
    if wanted:
        raise ClusterError(f"--port {wanted}: {why}")
    last = FIRST_BASE + BLOCKS * PORTS_PER_BLOCK - 1
    raise ClusterError(f"no free block of ports from {FIRST_BASE} to {last}; choose one by --port")
