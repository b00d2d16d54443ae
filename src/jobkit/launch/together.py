"""Whether the ranks of a command work together: what their sockets and their memory show.

Two copies of a program that know nothing of each other look like two ranks, and the sum of their
rates like a speed-up. Ranks that work together have a connection between them (torch.distributed's
store, Gloo, NCCL's bootstrap, gRPC), memory that they share (MPI on one node), or a network device
that ordinary programs do not open. The ranks are found by RANK and JOBKIT_RUN_DIR in their
environment. Only those of this machine are seen: of several nodes, the first one's.
"""

import contextlib
import functools
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FIRST_LOOK_S, LAST_LOOK_S, SLOWER = 0.5, 10.0, 1.4  # seconds between two looks, and their growth
MIN_LOOKS = 3  # at all ranks of this machine, before nothing seen means something
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
_DEVICES = ("/dev/infiniband/", "/dev/cxi", "/dev/hfi1", "/dev/gni", "/dev/kgni")
_ESTABLISHED, _LISTENS = "01", "0A"  # net/tcp_states.h
_MAPPED = "0000000000000000FFFF0000"  # IPv4 within IPv6


class Connection(NamedTuple):
    """One TCP socket, its ends as address:port in the kernel's hexadecimal digits."""

    local: str
    remote: str
    state: str


class Watch:
    """Looks at the ranks of one run now and then, until something shows that they work together."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str]) -> None:
        self.evidence = ""  # connection, shared memory or network device
        self.ranks = 0  # of the run, as they say
        self._run_dir, self._environ = str(run_dir.resolve()), environ
        self._looks = 0
        self._pause_s = FIRST_LOOK_S
        self._due = time.monotonic() + FIRST_LOOK_S

    def look(self) -> None:
        """Look, if it is time to."""
        if self.evidence or time.monotonic() < self._due:
            return
        self._pause_s = min(LAST_LOOK_S, self._pause_s * SLOWER)
        with contextlib.suppress(OSError):
            pids, self.ranks = ranks_of(self._run_dir)
            if self.ranks > 1 and pids:
                self.evidence = evidence_of(pids, self._others)
                self._looks += 1
        self._due = time.monotonic() + self._pause_s

    @property
    def found(self) -> str | None:
        """What shows that the ranks work together; "none": nothing does; None: not known."""
        if self.evidence:
            return self.evidence
        return "none" if self._looks >= MIN_LOOKS else None

    @functools.cached_property
    def _others(self) -> frozenset[str]:
        """The addresses of the allocation's nodes, as the kernel writes them."""
        if not (nodes := self._environ.get("SLURM_JOB_NODELIST")):
            return frozenset()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = ["scontrol", "show", "hostnames", nodes]
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
            return frozenset(a for name in done.stdout.split() for a in _addresses(name))
        return frozenset()


def _addresses(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for *_, (address, *_rest) in socket.getaddrinfo(name, None, socket.AF_INET):
            yield socket.inet_aton(str(address))[::-1].hex().upper()


def ranks_of(run_dir: str) -> tuple[dict[int, list[int]], int]:
    """The processes of each rank of a run on this machine, and how many ranks the run has."""
    pids: dict[int, list[int]] = {}
    size = 0
    wanted = b"JOBKIT_RUN_DIR=" + os.fsencode(run_dir)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if wanted not in words:
            continue
        own = dict(word.split(b"=", 1) for word in words if b"=" in word)
        if own.get(b"RANK", b"").isdigit():
            pids.setdefault(int(own[b"RANK"]), []).append(int(folder.name))
            with contextlib.suppress(ValueError):
                size = max(size, int(own.get(b"WORLD_SIZE", b"0")))
    return pids, size


def evidence_of(ranks: Mapping[int, Iterable[int]], nodes: frozenset[str] = frozenset()) -> str:
    """What shows that these ranks work together; empty where nothing does.

    ranks: the processes of each rank of this machine. nodes: addresses of the job's nodes.
    """
    sockets = {rank: list(_connections(pids)) for rank, pids in ranks.items()}
    if _connected(sockets) or any(map(_from_elsewhere, sockets.values())):
        return "connection"
    if any(_address(c.remote) in nodes and _elsewhere(c) for own in sockets.values() for c in own):
        return "connection"
    seen = set[str]()
    for pids in ranks.values():
        memory, devices = _memory(pids)
        if memory & seen:
            return "shared memory"
        if devices:
            return "network device"
        seen |= memory
    return ""


def _connected(sockets: Mapping[int, list[Connection]]) -> bool:
    """Whether a connection has one end in a rank and the other in another one."""
    ends = {
        (c.local, c.remote): rank
        for rank, own in sockets.items()
        for c in own
        if c.state == _ESTABLISHED
    }
    return any(ends.get((remote, local), rank) != rank for (local, remote), rank in ends.items())


def _from_elsewhere(own: list[Connection]) -> bool:
    """Whether somebody on another machine has connected to a port on which the rank listens."""
    ports = {c.local.rpartition(":")[2] for c in own if c.state == _LISTENS}
    return any(
        c.local.rpartition(":")[2] in ports and _elsewhere(c)
        for c in own
        if c.state == _ESTABLISHED
    )


def _elsewhere(connection: Connection) -> bool:
    remote = _address(connection.remote)
    loopback = remote.endswith("7F") if len(remote) == 8 else remote.endswith("01000000")
    return not loopback and remote != _address(connection.local)


def _address(end: str) -> str:
    return end.rpartition(":")[0]


def _connections(pids: Iterable[int]) -> Iterator[Connection]:
    """The TCP sockets of some processes."""
    inodes, pids = set[str](), list(pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(link.readlink())
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    if not inodes:
        return
    for table in ("tcp", "tcp6"):
        for pid in pids:  # they share a network namespace: the first one that still runs
            with contextlib.suppress(OSError):
                rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
                for words in map(str.split, rows):
                    if words[9] in inodes:
                        local, remote = (end.removeprefix(_MAPPED) for end in words[1:3])
                        yield Connection(local, remote, words[3])
                break


def _memory(pids: Iterable[int]) -> tuple[set[str], bool]:
    """The writable memory that some processes may share with others; whether they opened a network
    device."""
    shared, devices = set[str](), False
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                words = line.split(maxsplit=5)
                if len(words) < 6 or words[1][1:4:2] != "ws":
                    continue
                devices = devices or words[5].startswith(_DEVICES)
                if words[5].startswith(_SHARED):
                    shared.add(f"{words[3]} {words[4]}")  # device and inode
    return shared, devices
