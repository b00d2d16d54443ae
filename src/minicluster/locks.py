"""Locks and ports, so that two commands at once never meet.

A lock is a Unix socket with a name and no file ("abstract"): the kernel frees it when its
holder ends, however it ends, and nothing stays on disk.
"""

from __future__ import annotations

import errno
import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from minicluster.errors import ClusterError, UsageError
from minicluster.layout import PORTS_PER_CLUSTER, Layout, Ports

# Below Linux's usual ephemeral range, and below 20000, where training jobs take their ports.
FIRST_BASE = 7000
BLOCKS = 64


def _try_lock(name: str) -> socket.socket | None:
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
    lock = _try_lock(name)
    if lock is None:
        raise ClusterError(busy_message)
    with lock:
        yield


@contextmanager
def waited(name: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock of this name once it is free, or ClusterError after the time."""
    deadline = time.monotonic() + timeout_s
    while (lock := _try_lock(name)) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"another command still has the lock '{name}' after {timeout_s:g} s")
        time.sleep(0.2)
    with lock:
        yield


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
        with held(f"ports-{wanted}", f"--port {wanted}: another `up` is taking it; try again"):
            yield _wanted_block(wanted, nodes)
        return
    start = int(layout.tag, 16)  # clusters in different folders begin at different places
    for step in range(BLOCKS):
        base = FIRST_BASE + (start + step) % BLOCKS * PORTS_PER_CLUSTER
        lock = _try_lock(f"ports-{base}")
        if lock is None:
            continue
        with lock:
            if taken_port(Ports(base).used(nodes)) is None:
                yield Ports(base)
                return
    last = FIRST_BASE + BLOCKS * PORTS_PER_CLUSTER - 1
    raise ClusterError(f"no free block of ports from {FIRST_BASE} to {last}; choose one by --port")


def _wanted_block(base: int, nodes: int) -> Ports:
    if not 1024 <= base <= 65536 - PORTS_PER_CLUSTER:
        raise UsageError(f"--port {base}: must be from 1024 to {65536 - PORTS_PER_CLUSTER}")
    taken = taken_port(Ports(base).used(nodes))
    if taken is not None:
        raise ClusterError(
            f"--port {base}: port {taken} of its block is in use; choose another, or leave it out"
        )
    return Ports(base)
