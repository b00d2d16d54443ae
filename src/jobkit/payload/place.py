"""Rank, size, master and CPU threads of a process: from torchrun's variables, else Slurm's.

Nothing here imports torch, whose libraries read the number of threads when they are loaded.
"""

import itertools
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from jobkit.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """Rank, size and master of a process in its job. Ranks of a node follow each other."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    job_id: str | None = None
    restart: int = 0

    @property
    def nodes(self) -> int:
        """Nodes of the job, every one with the same number of ranks."""
        return self.world_size // self.local_world_size


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Read rank and size: torchrun's variables first, then Slurm's, else one process alone.

    Raises UsageError for an environment that contradicts itself, with the fix.
    """
    try:
        restart = int(environ.get("SLURM_RESTART_COUNT", 0))
        if "RANK" in environ and "WORLD_SIZE" in environ:
            fields = _read_torchrun(environ)
        elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
            fields = _read_slurm(environ, restart)
        else:
            return RankEnv()
    except (KeyError, ValueError) as error:
        why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
        raise UsageError(f"the launcher's variables cannot be read: {why}") from None
    place = RankEnv(**fields, job_id=environ.get("SLURM_JOB_ID"), restart=restart)
    ranks, of_node = place.world_size, place.local_world_size
    if min(ranks, of_node) < 1 or ranks % of_node or place.rank >= ranks:
        raise UsageError(
            f"{ranks} ranks do not fill nodes of {of_node}: give every node the same number "
            "(--ntasks-per-node, or --nproc-per-node off Slurm)"
        )
    return place


def _read_torchrun(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of RankEnv for a process that torchrun started, or somebody as torchrun does."""
    return {
        "rank": int(environ["RANK"]),
        "local_rank": int(environ.get("LOCAL_RANK", 0)),
        "world_size": int(environ["WORLD_SIZE"]),
        "local_world_size": int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
        "master_addr": environ.get("MASTER_ADDR", "127.0.0.1"),
        "master_port": int(environ.get("MASTER_PORT", 0)),
    }


def _read_slurm(environ: Mapping[str, str], restart: int) -> dict[str, Any]:
    """The fields of RankEnv for a task that srun started."""
    world_size, job_id = int(environ["SLURM_NTASKS"]), int(environ["SLURM_JOB_ID"])
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    # Such as 4(x2): Slurm writes other forms where the nodes have different numbers of tasks.
    same = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", tasks)
    if not same or int(same[1]) * int(same[2] or 1) != world_size:
        raise ValueError(
            f"SLURM_NTASKS is {world_size} and the step has {tasks} tasks on its nodes; give "
            "--nodes and --ntasks-per-node, and not --ntasks"
        )
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    master = nodes[0] + environ.get("JOBKIT_INTERFACE_SUFFIX", "")
    return {
        "rank": int(environ["SLURM_PROCID"]),
        "local_rank": int(environ["SLURM_LOCALID"]),
        "world_size": world_size,
        "local_world_size": int(same[1]),
        "master_addr": environ.get("MASTER_ADDR") or master,
        "master_port": int(environ.get("MASTER_PORT") or default_port(job_id, restart)),
    }


def expand_nodes(text: str) -> list[str]:
    """Expand a Slurm node list, such as 'n[1-3,07-08],gpu[1-2]-ib', into names in order.

    The leftmost bracket varies slowest, and zero padding is kept. Raises ValueError for text that
    is not one.
    """
    groups = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", text)
    if not groups or ",".join(groups) != text:
        raise ValueError(f"not a node list: {text!r}")
    names: list[str] = []
    for group in groups:
        parts = re.split(r"\[(.*?)\]", group)  # every second one stood in brackets
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(text: str) -> list[str]:
    """The numbers of '1-3,07-08', each with as many digits as the first of its range."""
    return [
        f"{number:0{len(first)}d}"
        for first, _, last in (word.partition("-") for word in text.split(","))
        for number in range(int(first), int(last or first) + 1)
    ]


def default_port(job_id: int, restart: int) -> int:
    """A port derived from the job id, below the usual range of ephemeral ports."""
    return 10_000 + (job_id * 31 + restart * 7919) % 20_000


def share_of_cores(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """The cores of one rank, as many as its threads: what Slurm gave the task, else its share."""
    cores = len(os.sched_getaffinity(0))
    if requested := environ.get("SLURM_CPUS_PER_TASK"):
        return max(1, min(int(requested), cores))
    allocated = int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    if cores * local_world_size <= allocated:
        return cores  # the task is bound to its own cores already
    return max(1, min(cores, allocated or cores) // local_world_size)


def set_threads(threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the CPU threads of all that computes in this process; before torch is imported.

    torch.set_num_threads is for the thread that calls it; every other one begins with what the
    environment says. PowerSGD computes in a thread of Gloo, and MKL adds in another order with
    another number of threads: equal runs would end with parameters that differ.
    """
    environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
