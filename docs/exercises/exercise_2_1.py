"""Exercise 2.1: what a rank knows before it joins, and a group that is not complete."""

import os
import time

import torch
import torch.distributed as dist

from ranks import join_group, main, on_ranks

WAIT_S = 1.0


def place(rank):
    """A rank's process, variables, and a sum before and after an all-reduce."""
    join_group(rank, 2)
    value = torch.tensor(float(rank + 1))
    alone = value.item()
    dist.all_reduce(value)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return (rank, str(os.getpid()), *(os.environ[n] for n in names), alone, value.item())


def places():
    head = ("rank", "process", "RANK", "LOCAL_RANK", "WORLD_SIZE", "own value")
    rows = on_ranks(place, join=False)
    return "two processes join a group and add up rank + 1", (*head, "sum"), rows


def come(rank, ranks_that_come):
    """Join a group of two ranks, of which only some come."""
    wait_s = WAIT_S if ranks_that_come == 1 else 20 * WAIT_S
    if rank >= ranks_that_come:
        return (ranks_that_come, rank, "-", "does not come", "-")
    begun = time.monotonic()
    try:
        join_group(rank, 2, wait_s=wait_s)
        text = "joined"
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return (ranks_that_come, rank, wait_s, text[:80], time.monotonic() - begun)


def incomplete():
    rows = [row for count in (2, 1) for row in on_ranks(come, count, join=False)]
    head = ("processes that come", "rank", "timeout (s)", "init_process_group", "took (s)")
    return "a group of two", head, rows


if __name__ == "__main__":
    main(places, incomplete)
