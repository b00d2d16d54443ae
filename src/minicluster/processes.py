"""Processes of a cluster: known by pid and start time, and found again by a mark.

A pid alone can be another process's by now; with its start time it cannot. Every daemon also
carries the cluster's folder in its environment, so that what a crashed `up` did not write down
is found too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from minicluster.layout import Layout

MARK = "JOBKIT_MINICLUSTER_DAEMON_OF"
PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process that we started; start_ticks is field 22 of /proc/<pid>/stat."""

    name: str
    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def boot_id() -> str:
    """Differs after each boot: pids and start times of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name: state, parent, ... None when it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it has ended.

    A zombie has ended: it may stay for seconds until its parent collects it.
    """
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def identify(name: str, pid: int) -> Process | None:
    ticks = start_ticks(pid)
    return None if ticks is None else Process(name, pid, ticks)


def _environ(pid: int) -> set[bytes]:
    try:
        return set((PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:  # gone, or another user's
        return set()


def _writes_log(pid: int, layout: Layout, name: str = "") -> bool:
    """Is this a daemon of Slurm that writes a log of this cluster, whose name begins so?

    slurmstepd overwrites its environment with its title, and has left slurmd's family.
    """
    folder = PROC / str(pid)
    try:
        if not (folder / "comm").read_text().startswith("slurm"):
            return False
        targets = [os.readlink(entry) for entry in (folder / "fd").iterdir()]  # noqa: PTH115
    except OSError:  # gone, or another user's
        return False
    return any(target.startswith(f"{layout.log}/{name}") for target in targets)


def _parents() -> dict[int, int]:
    """The parent of each process on this machine."""
    parents = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    return parents


def belongs(environ: set[bytes], layout: Layout) -> bool:
    """Is this the environment of a daemon, or of a job on a node, of this cluster?

    A shell that ran `env` has SLURM_CONF too, and salloc's has the job's id as well; only what
    runs on a node has SLURMD_NODENAME.
    """
    if f"{MARK}={layout.root}".encode() in environ:
        return True
    ours = f"SLURM_CONF={layout.slurm_conf}".encode() in environ
    return ours and any(entry.startswith(b"SLURMD_NODENAME=") for entry in environ)


def find_all(layout: Layout) -> list[Process]:
    """Every process of this cluster, with all their descendants, but not ourselves."""
    parents = _parents()
    pids = {pid for pid in parents if belongs(_environ(pid), layout) or _writes_log(pid, layout)}
    pids = _with_descendants(pids, parents)
    ourselves = os.getpid()
    while ourselves in parents:  # `down` may have been typed inside a job
        pids.discard(ourselves)
        ourselves = parents[ourselves]
    return _named(pids)


def find_on_node(layout: Layout, node: str) -> list[Process]:
    """What runs on a node: its slurmd, the slurmstepd, and then the jobs' processes."""
    daemons = {pid for pid in _parents() if _writes_log(pid, layout, f"slurmd.{node}.")}
    marks = {f"SLURM_CONF={layout.slurm_conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
    parents = _parents()
    jobs = {pid for pid in parents if marks <= _environ(pid)}
    jobs = _with_descendants(daemons | jobs, parents) - daemons
    return _named(daemons) + _named(jobs)


def _with_descendants(pids: set[int], parents: dict[int, int]) -> set[int]:
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in pids} - pids
        pids = pids | more
        grown = bool(more)
    return pids


def _named(pids: set[int]) -> list[Process]:
    """Those of the processes that are still there."""
    named = (identify("", pid) for pid in sorted(pids))
    return [process for process in named if process is not None]


def send(process: Process, signum: int) -> None:
    """Signal this very process: a pid that was given to another one meanwhile is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.alive():
            signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Poll until the condition holds; False when it did not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def stop(processes: Iterable[Process], grace_s: float) -> None:
    """End them all: TERM, then KILL after the grace; returns when they are gone."""
    left = [process for process in processes if process.alive()]
    for signum, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for process in left:
            send(process, signum)
        left = _wait_gone(left, patience_s)


def _wait_gone(processes: list[Process], timeout_s: float) -> list[Process]:
    """Those that are still there after the time."""
    wait_until(lambda: not any(process.alive() for process in processes), timeout_s)
    return [process for process in processes if process.alive()]
