"""Exercise 5.1: what a program leaves over, and a rank that calls a collective alone."""

import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import join_group, main, on_ranks

WAIT_S = 1.0


def leave(rank, cleans):
    """Threads and sockets of a rank before, in and after a process group."""
    end, rows = "destroy_process_group" if cleans else "nothing", []

    def note(moment):
        threads = len(list(Path("/proc/self/task").iterdir()))
        sockets = sum("socket:" in str(p.resolve()) for p in Path("/proc/self/fd").iterdir())
        rows.append((end, rank, moment, threads, sockets))

    note("before joining")
    join_group(rank, 2)
    note("after an all-reduce")
    dist.barrier()
    if cleans:
        dist.destroy_process_group()
    time.sleep(1.0)  # threads end by themselves
    note("at the end of main()")
    return rows


def left_over():
    rows = [row for cleans in (False, True) for row in on_ranks(leave, cleans, join=False)[0]]
    head = ("main() ends with", "rank", "moment", "threads", "sockets")
    return "threads and sockets of a rank", head, rows


def call_more(rank, call):
    """Rank 0 has one batch more than rank 1, which goes on without it."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    given_up, begun = Path(os.environ["EXERCISE_FOLDER"]) / "given-up", time.monotonic()
    if rank == 1:  # it does something else: writes a checkpoint, or computes on
        while not given_up.exists():
            time.sleep(0.02)
        return (call, rank, 3, "-", "goes on alone")
    timeout, text = datetime.timedelta(seconds=WAIT_S), "no error"
    try:
        if call == "monitored_barrier":
            dist.monitored_barrier(timeout=timeout)
        else:
            dist.all_reduce(torch.ones(1), async_op=True).wait(timeout)
    except RuntimeError as error:  # without the place in the source
        text = str(error).strip().splitlines()[0].rsplit("] ", 1)[-1][:90]
    waited = time.monotonic() - begun
    given_up.touch()
    return (call, rank, 3, waited, text)


def alone():
    calls = ("all_reduce", "monitored_barrier")
    rows = [row for call in calls for row in on_ranks(call_more, call)]
    title = f"rank 0 calls a fourth collective and rank 1 does not; timeout {WAIT_S:g} s"
    return title, ("fourth call", "rank", "calls done", "waited (s)", "what it says"), rows


if __name__ == "__main__":
    main(left_over, alone)
