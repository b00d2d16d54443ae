"""What the exercises share: a function on several ranks of this machine, and tables of results.

The ranks compute on the CPU. They are forked from a server process that has imported torch, so that
starting them takes milliseconds, and meet through a file, which needs no free port.
"""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # check 2.1 has another one in dist

MIB = 2**20
WAIT_S = 60.0  # until a collective gives up on a rank that does not come
# Compilers and sharding are imported by torch when they are first used, which takes seconds.
PRELOAD = ["ranks", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]


@dataclass(frozen=True)
class Failure:
    """What a rank raised, or why there is no result of it."""

    rank: int
    text: str  # the error in one line
    line: int | None = None  # of the file that is checked
    at_s: float = float("inf")  # monotonic clock of the machine


def on_ranks(work, *args, world=2, join=True):
    """Call work(rank, *args) on each rank; return the results in rank order.

    join: whether the ranks are in a process group (Gloo) before. RuntimeError where one fails.
    """
    results = attempt(work, *args, world=world, join=join)
    if failures := [result for result in results if isinstance(result, Failure)]:
        first = min(failures, key=lambda failure: failure.at_s)
        raise RuntimeError(f"rank {first.rank}: {first.text}")
    return results


def attempt(work, *args, world=2, join=True, file="", limit_s=120.0):
    """As on_ranks, with a Failure as the result of each rank that fails.

    file: a learner's file, of which a Failure names the line. limit_s: for all ranks together.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ready = context.Process(target=time.sleep, args=(0,))  # the imports do not count in the limit
    ready.start()
    ready.join()
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        words = (world, folder, join, work, args, file)
        ranks = [context.Process(target=_be_rank, args=(r, *words)) for r in range(world)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_s
        results = [Failure(rank, f"has not ended after {limit_s:g} s") for rank in range(world)]
        waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for sentinel in wait(list(waiting), left):
                rank = waiting.pop(sentinel)
                results[rank] = Failure(rank, "ended without a result", at_s=time.monotonic())
                with contextlib.suppress(OSError):
                    results[rank] = pickle.loads(Path(folder, f"result-{rank}").read_bytes())
                if isinstance(results[rank], Failure):  # the others may wait for it
                    deadline = min(deadline, time.monotonic() + 1.0)
        for process in ranks:
            process.kill()
            process.join()
    return results


def _be_rank(rank, world, folder, join, work, args, file):
    """Call the work as one rank, and leave its result or why there is none."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of torch, about its own insides
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    # A host name may resolve to an address that nobody answers at.
    os.environ.update(EXERCISE_FOLDER=folder, GLOO_SOCKET_IFNAME="lo")
    try:
        if join:
            join_group(rank, world, wait_s=20.0 if file else WAIT_S)
        result = work(rank, *args)
    except BaseException as error:  # SystemExit too: a learner's file may call exit()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")
        result = Failure(rank, text, line, time.monotonic())
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
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


def count_collectives(call):
    """How often each collective was issued in a call: by name, by torch's profiler."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler reports its own start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    names = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("c10d::")}
    return {name.replace("_", ""): count for name, count in names.items()}


def kept_for_backward(model, call):
    """The bytes of all tensors that a call keeps for its backward pass, but the parameters."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(kept.values())


def show(title, head, rows):
    """Print a table: numbers are aligned on the right, floats have four significant digits."""

    def written(value):
        if isinstance(value, bool | None):
            return {True: "yes", False: "no", None: "-"}[value]
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

    print(title)
    columns = []
    for name, *values in zip(head, *rows, strict=True):
        texts = [name, *(v if isinstance(v, str) else written(v) for v in values)]
        side = "<" if any(isinstance(v, str | bool) for v in values) else ">"
        columns.append([f"{text:{side}{max(map(len, texts))}}" for text in texts])
    for line in zip(*columns, strict=True):
        print(f"  {'  '.join(line)}".rstrip())
    print(flush=True)


def main(*probes):
    """Run each probe and print what it measured; a probe returns title, head and rows."""
    for probe in probes:
        show(*probe())
