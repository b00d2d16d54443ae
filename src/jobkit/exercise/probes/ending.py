"""Probes of exercise 5.1: device indices, what is left over, a rank alone, and launchers."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from jobkit.exercise.ranks import join_group, leave_group, on_ranks
from jobkit.exercise.table import Table

_WAIT_S = 1.0


def _device(rank: int) -> list[tuple[object, ...]]:
    """The core that each rule takes on a node that has one; each rank is the first of its node."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    local_rank, there = 0, sorted(os.sched_getaffinity(0))
    found: list[tuple[object, ...]] = []
    for name, index in (("rank", rank), ("local_rank", local_rank)):
        try:
            what = f"core {there[index]}"
        except IndexError as error:
            what = f"IndexError: {error}"
        found.append((name, rank, rank, local_rank, len(there), index, what))
    return found


def devices() -> list[Table]:
    """Two nodes of one process and one device each; here a node's device is a core."""
    rows = sorted(row for rows in on_ranks(_device, join=False) for row in rows)[::-1]
    return [
        Table(
            "two nodes with one process each; the devices of a node are the cores it may use",
            ("index taken", "node", "rank", "local_rank", "devices of the node", "index",
             "what is found"),
            rows,
        )
    ]  # fmt: skip


def _count() -> tuple[int, int]:
    """Threads and sockets of this process."""
    names = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    tasks = list(Path("/proc/self/task").iterdir())
    return len(tasks), sum(name.startswith("socket:") for name in names)


def _leave(rank: int, cleans: bool) -> list[tuple[object, ...]]:
    """Threads and sockets before, in and after a process group."""
    own = "destroy_process_group" if cleans else "nothing"
    found: list[tuple[object, ...]] = [(own, rank, "before joining", *_count())]
    join_group(rank, 2)
    dist.all_reduce(torch.ones(1))
    found.append((own, rank, "after an all-reduce", *_count()))
    dist.barrier()
    if cleans:
        leave_group()
    time.sleep(1.0)  # threads end by themselves
    found.append((own, rank, "at the end of main()", *_count()))
    return found


def left_over() -> list[Table]:
    """A program that leaves its process group, and one that does not."""
    rows = [row for cleans in (False, True) for row in on_ranks(_leave, cleans, join=False)[0]]
    return [
        Table(
            "threads and sockets of a rank",
            ("main() ends with", "rank", "moment", "threads", "sockets"),
            rows,
        )
    ]


def _uneven(rank: int, asks: bool) -> tuple[object, ...]:
    """Rank 0 has one batch more than rank 1, which goes on without it."""
    join_group(rank, 2)
    done = 0
    while done < 3:
        dist.all_reduce(torch.ones(1))
        done += 1
    what = "monitored_barrier" if asks else "all_reduce"
    given_up = Path(os.environ["JOBKIT_EXERCISE_FOLDER"]) / "given-up"
    if rank == 1:  # it does something else: writes a checkpoint, or computes on
        end = time.monotonic() + 20 * _WAIT_S
        while not given_up.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return (what, rank, done, None, "goes on alone")
    begun = time.monotonic()
    try:
        if asks:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=_WAIT_S))
        else:
            call = dist.all_reduce(torch.ones(1), async_op=True)
            call.wait(datetime.timedelta(seconds=_WAIT_S))
        said = "no error"
    except RuntimeError as error:
        said = _first_sentence(str(error))
    waited = time.monotonic() - begun
    given_up.touch()
    return (what, rank, done, waited, said)


def _first_sentence(text: str) -> str:
    """The part of an error that says what happened: without the place in the source."""
    line = text.strip().splitlines()[0]
    return line.rsplit("] ", 1)[-1][:90]


def alone() -> list[Table]:
    """A collective that one rank does not call."""
    rows = [row for asks in (False, True) for row in on_ranks(_uneven, asks, join=False)]
    return [
        Table(
            f"rank 0 calls a fourth collective and rank 1 does not; timeout {_WAIT_S:g} s",
            ("fourth call", "rank", "calls done", "waited (s)", "what it says"),
            rows,
        )
    ]


_PROGRAM = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as out:
    print(*(os.environ[name] for name in names), sep="\\t", file=out)
"""


def launchers() -> list[Table]:
    """What torchrun sets in the environment of each process that it starts."""
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        program = Path(folder) / "program.py"
        program.write_text(_PROGRAM)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *words, str(program), folder], capture_output=True, text=True
        )
        files = [Path(folder) / str(rank) for rank in range(2)]
        if done.returncode or not all(file.exists() for file in files):
            raise RuntimeError(f"torchrun ended with {done.returncode}: {done.stderr[-500:]}")
        rows = [("torchrun", *file.read_text().split()) for file in files]
    return [
        Table(
            "two processes started by torchrun",
            ("launcher", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"),
            rows,
        )
    ]
