"""Probes of exercise 2.1: what a rank knows before it joins, and a group that is not complete."""

import os
import time

import torch
import torch.distributed as dist

from jobkit.exercise.ranks import join_group, on_ranks
from jobkit.exercise.table import Table

_WAIT_S = 1.0


def _place(rank: int) -> tuple[object, ...]:
    """A rank's process, variables, and a sum before and after an all-reduce."""
    before = dist.is_initialized()
    join_group(rank, 2)
    value = torch.tensor(float(rank + 1))
    alone = value.item()
    dist.all_reduce(value)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return (rank, str(os.getpid()), *(os.environ[n] for n in names), before, alone, value.item())


def places() -> list[Table]:
    """Two processes, their variables, and a sum over both."""
    return [
        Table(
            "two processes join a group and add up rank + 1",
            ("rank", "process", "RANK", "LOCAL_RANK", "WORLD_SIZE", "joined before", "own value",
             "sum"),
            on_ranks(_place, join=False),
        )
    ]  # fmt: skip


def _missing(rank: int, comes: int) -> tuple[object, ...]:
    """Join a group of two ranks, of which only some come."""
    begun = time.monotonic()
    wait_s = _WAIT_S if comes == 1 else 20 * _WAIT_S
    if rank >= comes:
        return (comes, rank, None, "does not come", None)
    try:
        join_group(rank, 2, wait_s=wait_s)
        what = "joined"
    except (RuntimeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return (comes, rank, wait_s, what[:80], time.monotonic() - begun)


def incomplete() -> list[Table]:
    """A group of two of which one comes."""
    rows = [row for comes in (2, 1) for row in on_ranks(_missing, comes, join=False)]
    return [
        Table(
            "a group of two",
            ("processes that come", "rank", "timeout (s)", "init_process_group", "took (s)"),
            rows,
        )
    ]
