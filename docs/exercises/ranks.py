"""What the exercises share: a function on several ranks of this machine, and tables of results.

The ranks compute on the CPU. They are forked from a server process that has imported torch, so that
starting them takes milliseconds, and meet through a file, which needs no free port.
"""

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # check 2.1 has another one in dist

MIB = 2**20
WAIT_S = 20.0  # until a collective gives up on a rank that does not come
# Compilers and sharding are imported by torch when they are first used, which takes seconds.
PRELOAD = ["ranks", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]


class RankError(RuntimeError):
    """What a rank raised, or why there is no result of it."""

    def __init__(self, rank, text, line=None):
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text, self.line = rank, text, line


def on_ranks(work, *args, world=2, join=True, file="", limit_s=120.0):
    """Call work(rank, *args) on each rank; return the results in rank order.

    join: whether the ranks are in a process group (Gloo) before. file: a learner's file, of which a
    RankError names the line. RankError where a rank fails, or not all end in time.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes, ranks, results = [], {}, [None] * world
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        try:
            for rank in range(world):
                result, other_end = context.Pipe(duplex=False)
                words = (other_end, rank, world, folder, join, work, args, file)
                process = context.Process(target=_be_rank, args=words)
                process.start()
                processes.append(process)
                other_end.close()
                ranks[result] = rank
            deadline = time.monotonic() + limit_s
            while ranks:
                ready = wait(list(ranks), max(0, deadline - time.monotonic()))
                if not ready:
                    raise RankError(min(ranks.values()), f"has not ended after {limit_s:g} s")
                rank = ranks.pop(ready[0])
                try:
                    results[rank], error = ready[0].recv()
                except EOFError:
                    error = ("ended without a result",)
                if error:
                    raise RankError(rank, *error)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results


def _be_rank(end, rank, world, folder, join, work, args, file):
    """Call the work as one rank; send its result, or what it raised and in which line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of torch, about its own insides
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    # A host name may resolve to an address that nobody answers at.
    os.environ.update(EXERCISE_FOLDER=folder, GLOO_SOCKET_IFNAME="lo")
    try:
        if join:
            join_group(rank, world)
        end.send((work(rank, *args), None))
    except BaseException as error:  # SystemExit too: a learner's file may call exit()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")
        end.send((None, (text, line)))
        time.sleep(2)  # until this is read: the other ranks would fail of its end
    sys.stdout.flush()
    os._exit(0)  # torch's threads may still run, over which an orderly end can trip


def join_group(rank, world, name="store", wait_s=WAIT_S):
    """Join a process group of all ranks, through a file of this name in their folder."""
    store = dist.FileStore(f"{os.environ['EXERCISE_FOLDER']}/{name}", world)
    timeout = datetime.timedelta(seconds=wait_s)
    init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    # A rank that left before the other is connected would end it.
    dist.all_reduce(torch.zeros(1))


def gather(value):
    """The value of every rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def show(title, head, rows):
    """Print a table: numbers are aligned on the right, floats have four significant digits."""
    print(title)
    columns = []
    for name, *values in zip(head, *rows, strict=True):
        texts = [name, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)]
        side = "<" if isinstance(values[0], str) else ">"
        columns.append([f"{text:{side}{max(map(len, texts))}}" for text in texts])
    for line in zip(*columns, strict=True):
        print(f"  {'  '.join(line)}".rstrip())
    print(flush=True)


def main(*probes):
    """Run each probe and print what it measured; a probe returns title, head and rows."""
    for probe in probes:
        show(*probe())
