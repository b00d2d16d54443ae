"""Start a function on several ranks of this machine, on the CPU, and bring back what it returns.

The ranks are forked from a server process that has imported torch, so that starting them takes
milliseconds. They meet through a file, which needs no free port.
"""

import contextlib
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobkit.gpus import hide_gpus

LIMIT_S = 120.0  # for all ranks together, on a machine that is busy with other things
_WAIT_S = 60.0  # until a collective gives up on a rank that does not come
_CHECKED_WAIT_S = 20.0  # as above for a learner's file, where a call may well be missing
_GRACE_S = 1.0  # after one rank has failed, for the others, which may wait for it
# Compilers and sharding are imported by torch when they are first used, which takes seconds.
_PRELOAD = ["jobkit.exercise.schedule", "torch._dynamo", "torch.distributed.fsdp"]


@dataclass(frozen=True)
class Failure:
    """What a rank raised, or why there is no result of it."""

    rank: int
    text: str  # the error in one line
    line: int | None = None  # of the file that is checked
    at_s: float = float("inf")  # monotonic clock of the machine
    kind: str = ""  # class of the exception


class RankError(RuntimeError):
    """A rank of a probe failed; the text has the first reason."""


def on_ranks(work: Callable[..., Any], *args: Any, world: int = 2, join: bool = True) -> list[Any]:
    """Call work(rank, *args) on each rank; return the results in rank order.

    work: a function of a module, as it is imported by the ranks. join: whether the ranks are in a
    process group (Gloo) before it is called. Raises RankError where one fails.
    """
    found = attempt(work, *args, world=world, join=join)
    failures = [each for each in found if isinstance(each, Failure)]
    if failures:
        first = min(failures, key=lambda f: f.at_s)
        raise RankError(f"rank {first.rank}: {first.text}")
    return found


def attempt(
    work: Callable[..., Any],
    *args: Any,
    world: int = 2,
    join: bool = True,
    file: str = "",
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """As on_ranks, with a Failure as the result of each rank that fails.

    file: the file of which a Failure names the line.
    """
    hide_gpus()  # the ranks compute on the CPU
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ready = context.Process(target=_nothing)  # the imports do not count in the limit
    ready.start()
    ready.join()
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(
                target=_be_rank, args=(pairs[rank][1], rank, world, folder, join, work, args, file)
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, end in pairs:
            end.close()  # so that a rank that dies ends its pipe
        try:
            return _results([pair[0] for pair in pairs], limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _nothing() -> None:
    """Ends as soon as the server can start processes."""


def _results(pipes: Sequence[Connection], limit_s: float) -> list[Any]:
    """What each rank sends before the limit."""
    found: list[Any] = [
        Failure(rank, f"has not ended after {limit_s:g} s") for rank in range(len(pipes))
    ]
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + limit_s
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                found[rank] = Failure(rank, "ended without a result", at_s=time.monotonic())
            if isinstance(found[rank], Failure):
                end = min(end, time.monotonic() + _GRACE_S)
    return found


def _be_rank(
    pipe: Connection,
    rank: int,
    world: int,
    folder: str,
    join: bool,
    work: Callable[..., Any],
    args: Sequence[Any],
    file: str,
) -> None:
    """Call the work as one rank, and send its result or why there is none."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of torch, about its own insides
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ["JOBKIT_EXERCISE_FOLDER"] = folder
    if sys.platform == "linux":  # a host name may resolve to an address that nobody answers at
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if join:
            join_group(rank, world, wait_s=_CHECKED_WAIT_S if file else _WAIT_S)
        pipe.send(work(rank, *args))
    # SystemExit too: the learner's file may call exit().
    except BaseException as error:
        pipe.send(_failure(rank, error, file))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may still run, over which an orderly end can trip


def join_group(rank: int, world: int, name: str = "store", wait_s: float = _WAIT_S) -> None:
    """Join a process group of all ranks, through a file of this name in their folder."""
    store = dist.FileStore(str(Path(os.environ["JOBKIT_EXERCISE_FOLDER"]) / name), world)
    timeout = datetime.timedelta(seconds=wait_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    # A rank that left before the other is connected would end it.
    dist.all_reduce(torch.zeros(1))


def _failure(rank: int, error: BaseException, file: str) -> Failure:
    """The error in one line; of a file that is checked, the last line of it that took part."""
    text = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    said = f"{kind}: {text}" if text else kind
    return Failure(rank, said, line, time.monotonic(), kind)


def gather(value: Any) -> list[Any]:
    """The value of every rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leave_group() -> None:
    """Leave the process group, where there is one."""
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()
