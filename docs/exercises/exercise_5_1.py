"""Exercise 5.1: device indices, what is left over, a rank alone, and launchers."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import join_group, leave_group, main, on_ranks

WAIT_S = 1.0


def take_device(rank):
    """The core that each rule takes on a node that has one; each rank is the first of its node."""
    cores, local_rank = sorted(os.sched_getaffinity(0)), 0
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    there, rows = sorted(os.sched_getaffinity(0)), []
    for name, index in (("rank", rank), ("local_rank", local_rank)):
        try:
            text = f"core {there[index]}"
        except IndexError as error:
            text = f"IndexError: {error}"
        rows.append((name, rank, rank, local_rank, len(there), index, text))
    return rows


def devices():
    """Two nodes of one process and one device each; here a node's device is a core."""
    rows = sorted(row for rows in on_ranks(take_device, join=False) for row in rows)[::-1]
    head = ("index taken", "node", "rank", "local_rank", "devices of the node", "index")
    title = "two nodes with one process each; the devices of a node are the cores it may use"
    return title, (*head, "what is found"), rows


def threads_and_sockets():
    """Those of this process."""
    names = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    threads = len(list(Path("/proc/self/task").iterdir()))
    return threads, sum(name.startswith("socket:") for name in names)


def leave(rank, cleans):
    """Threads and sockets before, in and after a process group."""
    end = "destroy_process_group" if cleans else "nothing"
    rows = [(end, rank, "before joining", *threads_and_sockets())]
    join_group(rank, 2)
    dist.all_reduce(torch.ones(1))
    rows.append((end, rank, "after an all-reduce", *threads_and_sockets()))
    dist.barrier()
    if cleans:
        leave_group()
    time.sleep(1.0)  # threads end by themselves
    return [*rows, (end, rank, "at the end of main()", *threads_and_sockets())]


def left_over():
    """A program that leaves its process group, and one that does not."""
    rows = [row for cleans in (False, True) for row in on_ranks(leave, cleans, join=False)[0]]
    head = ("main() ends with", "rank", "moment", "threads", "sockets")
    return "threads and sockets of a rank", head, rows


def call_more(rank, asks):
    """Rank 0 has one batch more than rank 1, which goes on without it."""
    join_group(rank, 2)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    call = "monitored_barrier" if asks else "all_reduce"
    given_up = Path(os.environ["EXERCISE_FOLDER"]) / "given-up"
    begun = time.monotonic()
    if rank == 1:  # it does something else: writes a checkpoint, or computes on
        while not given_up.exists() and time.monotonic() < begun + 20 * WAIT_S:
            time.sleep(0.02)
        return (call, rank, 3, None, "goes on alone")
    timeout = datetime.timedelta(seconds=WAIT_S)
    try:
        if asks:
            dist.monitored_barrier(timeout=timeout)
        else:
            dist.all_reduce(torch.ones(1), async_op=True).wait(timeout)
        text = "no error"
    except RuntimeError as error:  # without the place in the source
        text = str(error).strip().splitlines()[0].rsplit("] ", 1)[-1][:90]
    waited = time.monotonic() - begun
    given_up.touch()
    return (call, rank, 3, waited, text)


def alone():
    """A collective that one rank does not call."""
    rows = [row for asks in (False, True) for row in on_ranks(call_more, asks, join=False)]
    title = f"rank 0 calls a fourth collective and rank 1 does not; timeout {WAIT_S:g} s"
    return title, ("fourth call", "rank", "calls done", "waited (s)", "what it says"), rows


PROGRAM = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as out:
    print(*(os.environ[name] for name in names), sep="\\t", file=out)
"""


def launchers():
    """What torchrun sets in the environment of each process that it starts."""
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*words, "--nproc-per-node", "2", program, folder], check=True)
        rows = [("torchrun", *(Path(folder) / str(r)).read_text().split()) for r in range(2)]
    head = ("launcher", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    return "two processes started by torchrun", head, rows


if __name__ == "__main__":
    main(devices, left_over, alone, launchers)
