"""The processes of a cluster, found by a mark in their environment: nothing is written down.

So what an `up` that was killed has left is found too, whatever it had come to.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jobkit.errors import NotStarted
from jobkit.processes import children_of, environments, process_start

MARK = "JOBKIT_MINICLUSTER_DAEMON_OF"  # its value: the cluster's folder, a colon, the daemon's name


class Member(NamedTuple):
    """A process of a cluster."""

    pid: int
    name: str  # of a daemon, such as slurmd.n1; else empty
    node: str  # on which it runs; else empty


def members(root: Path) -> list[Member]:
    """Every process of the cluster, with all their descendants, but not this one."""
    found = {}
    for pid, environ in environments():
        with contextlib.suppress(OSError):  # it has ended
            if member := _member(pid, environ, root):
                found[pid] = member
    for member in (queue := [*found.values()]):
        for pid in children_of(member.pid):
            if pid not in found and process_start(pid) is not None:
                found[pid] = Member(pid, "", member.node)
                queue.append(found[pid])
    found.pop(os.getpid(), None)  # `down` may have been typed inside a job
    return [*found.values()]


def _member(pid: int, environ: Mapping[str, str], root: Path) -> Member | None:
    owner, _, name = environ.get(MARK, "").partition(":")
    if owner == str(root):
        return Member(pid, name, name.partition("slurmd.")[2])
    # A shell that ran `env` has SLURM_CONF too: only what runs on a node has SLURMD_NODENAME.
    if environ.get("SLURM_CONF") == f"{root}/slurm.conf" and "SLURMD_NODENAME" in environ:
        return Member(pid, "", environ["SLURMD_NODENAME"])
    folder = Path(f"/proc/{pid}")
    if (folder / "comm").read_text().startswith("slurm"):
        # slurmstepd has left slurmd's family, and its title has overwritten its environment.
        links = "\n".join(str(entry.readlink()) for entry in (folder / "fd").iterdir())
        pattern = rf"^{re.escape(str(root))}/log/slurm(?:ctld|d\.(\w+))\.log$"
        if log := re.search(pattern, links, re.MULTILINE):
            return Member(pid, "", log[1] or "")
    return None


def dead(root: Path, expected: list[str]) -> list[str]:
    """Which of the expected daemons do not run."""
    alive = {member.name for member in members(root)}
    return [name for name in expected if name not in alive]


def end(root: Path, grace_s: float, which: Callable[[Member], bool] = lambda member: True) -> int:
    """End processes of a cluster: TERM, then, after the grace period, KILL; return how many.

    By age: with KILL a node's daemons end before they see the end of its jobs.
    """
    begin, signalled = time.monotonic(), set[int]()
    while left := sorted(member.pid for member in members(root) if which(member)):
        age_s = time.monotonic() - begin
        if age_s > grace_s + 10:
            raise NotStarted(f"processes of the cluster that do not end: {left}")
        for pid in left:
            if age_s >= grace_s or pid not in signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if age_s >= grace_s else signal.SIGTERM)
        signalled.update(left)
        time.sleep(0.02)
    return len(signalled)
