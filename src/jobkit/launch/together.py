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
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jobkit.outcome import slurm_jobs
from jobkit.processes import environments

FIRST_LOOK_S, LAST_LOOK_S, SLOWER = 0.5, 10.0, 1.4  # seconds between two looks, and their growth
MIN_LOOKS = 3  # at all ranks of this machine, before nothing seen means something
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
_DEVICES = ("/dev/infiniband/", "/dev/cxi", "/dev/hfi1", "/dev/gni", "/dev/kgni")
_ESTABLISHED, _LISTENS = "01", "0A"  # net/tcp_states.h
_MAPPED = "0000000000000000FFFF0000"  # IPv4 within IPv6


class Watch:
    """Looks at the ranks of one run now and then, until something shows that they work together."""

    def __init__(self, run_dir: Path) -> None:
        self.evidence = ""  # connection, shared memory or network device
        self.ranks = 0  # of the run, as they say
        self._run_dir, self._looks = str(run_dir.resolve()), 0
        self._pause_s, self._due = FIRST_LOOK_S, time.monotonic() + FIRST_LOOK_S

    def look(self) -> None:
        """Look, if it is time to."""
        if self.evidence or time.monotonic() < self._due:
            return
        self._pause_s = min(LAST_LOOK_S, self._pause_s * SLOWER)
        with contextlib.suppress(OSError):
            pids, self.ranks = ranks_of(self._run_dir)
            if self.ranks > 1 and pids:
                self.evidence = evidence_of(pids, _addresses_of_job())
                self._looks += 1
        self._due = time.monotonic() + self._pause_s

    @property
    def found(self) -> str | None:
        """What shows that the ranks work together; "none": nothing does; None: not known."""
        return self.evidence or ("none" if self._looks >= MIN_LOOKS else None)


def ranks_of(run_dir: str) -> tuple[dict[int, list[int]], int]:
    """The processes of each rank of a run on this machine, and how many ranks the run has."""
    pids, size = dict[int, list[int]](), 0
    for pid, own in environments():
        if own.get("JOBKIT_RUN_DIR") == run_dir:
            with contextlib.suppress(ValueError):  # it is no rank
                pids.setdefault(int(own.get("RANK", "")), []).append(pid)
                size = max(size, int(own.get("WORLD_SIZE", "0")))
    return pids, size


@functools.cache
def _addresses_of_job() -> frozenset[str]:
    """The addresses of the allocation's nodes, as the kernel writes them."""
    nodes, found = os.environ.get("SLURM_JOB_NODELIST"), set[str]()
    names = slurm_jobs.output(["scontrol", "show", "hostnames", nodes]) if nodes else ""
    for name in (names or "").split():
        with contextlib.suppress(OSError):
            for entry in socket.getaddrinfo(name, None, socket.AF_INET):  # of all its interfaces
                found.add(socket.inet_aton(str(entry[4][0]))[::-1].hex().upper())
    return frozenset(found)


def evidence_of(ranks: Mapping[int, Iterable[int]], nodes: frozenset[str] = frozenset()) -> str:
    """What shows that these ranks work together; empty where nothing does.

    ranks: the processes of each rank of this machine. nodes: addresses of the job's nodes.
    """
    sockets = [(rank, *c) for rank, pids in ranks.items() for c in _connections(list(pids))]
    ends = {(local, remote): rank for rank, local, remote, s in sockets if s == _ESTABLISHED}
    # A rank listens on these; whoever comes from elsewhere is one of another machine.
    doors = {(rank, local.partition(":")[2]) for rank, local, _, s in sockets if s == _LISTENS}
    for (local, remote), rank in ends.items():
        if ends.get((remote, local), rank) != rank:
            return "connection"
        (here, _, port), there = local.partition(":"), remote.partition(":")[0]
        loopback = there.endswith("7F") if len(there) == 8 else there.endswith("01000000")
        # The other end is on another machine, and it is one of the job's, or came to a rank.
        if not loopback and there != here and (there in nodes or (rank, port) in doors):
            return "connection"
    seen = set[str]()
    for pids in ranks.values():
        memory = set[str]()
        for place, inode in (mapping for pid in pids for mapping in _mappings(pid)):
            if place.startswith(_DEVICES):
                return "network device"
            if place.startswith(_SHARED):
                memory.add(inode)
        if memory & seen:
            return "shared memory"
        seen |= memory
    return ""


def _connections(pids: list[int]) -> Iterator[tuple[str, str, str]]:
    """The TCP sockets of one rank's processes: both ends, hexadecimal address:port, and state."""
    inodes = set[str]()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    # They share a network namespace.
    for path in (Path(f"/proc/{pid}/net/{table}") for pid in pids[:1] for table in ("tcp", "tcp6")):
        with contextlib.suppress(OSError):
            for words in map(str.split, path.read_text().splitlines()[1:]):
                if words[9] in inodes:
                    local, remote = (end.removeprefix(_MAPPED) for end in words[1:3])
                    yield local, remote, words[3]


def _mappings(pid: int) -> Iterator[tuple[str, str]]:
    """The writable memory that a process may share with others: its path, device and inode."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[1][1:4:2] == "ws":
                yield words[5], f"{words[3]} {words[4]}"
