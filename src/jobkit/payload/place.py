"""Rank, master and CPU threads, from torchrun's or Slurm's environment; without torch."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from jobkit.errors import UsageError
from jobkit.payload import slurm_env


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
    job: dict[str, Any] = {
        "job_id": environ.get("SLURM_JOB_ID"),
        "restart": int(environ.get("SLURM_RESTART_COUNT", 0)),
    }
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world = int(environ["WORLD_SIZE"])
        place = RankEnv(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            world_size=world,
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world)),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(environ.get("MASTER_PORT", 0)),
            **job,
        )
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        place = RankEnv(**slurm_env.place(environ), **job)
    else:
        place = RankEnv()
    if place.world_size % place.local_world_size or place.rank >= place.world_size:
        raise UsageError(
            f"{place.world_size} ranks do not fill nodes of {place.local_world_size}: give every "
            "node the same number (--ntasks-per-node, or --nproc-per-node off Slurm)"
        )
    return place


def share_of_cores(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """CPU threads for one rank: what Slurm gave the task, else an even share of the cores."""
    cores = len(os.sched_getaffinity(0))
    if given := environ.get("SLURM_CPUS_PER_TASK"):
        return max(1, min(int(given), cores))
    allocated = int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    if cores * local_world_size <= allocated:
        return cores  # the task is bound to cores of its own already
    return max(1, min(cores, allocated or cores) // local_world_size)


def set_threads(threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the CPU threads of all that computes in this process; before torch is imported.

    torch.set_num_threads is for the thread that calls it: every other one begins with what the
    environment says. PowerSGD computes in a thread of Gloo, or in the caller's where the sum is
    there already, and MKL adds in another order with another number of threads: runs that are the
    same would end with parameters that differ.
    """
    environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
