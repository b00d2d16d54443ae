"""What the checks of the exercises share: a learner's file on two ranks, and what is wrong with it.

A check has work(rank, path), which runs the file on a rank, and judge(results), which returns for
each promise whether it is kept, the promise, and what was found.
"""

import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from ranks import Failure, attempt

# What Gloo says when another rank has ended, or does not come.
ALONE = re.compile(r"timed? ?out|connection (closed|reset)|peer", re.IGNORECASE)


class MissingError(Exception):
    """The file lacks a function, or a function does not return what it must."""


def load(path, *names):
    """Import the learner's file; raise MissingError where it lacks one of the functions."""
    loader = SourceFileLoader("my_exercise", path)  # whatever the name of the file ends with
    module = sys.modules[loader.name] = ModuleType(loader.name)
    module.__file__ = path
    sys.dont_write_bytecode = True
    exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)
    for name in names:
        if not callable(getattr(module, name, None)):
            raise MissingError(f"the file has no function {name}()")
    return module


def check(path, work, judge, join=True):
    """Run work(rank, path) on two ranks; return (is kept, text) of each promise.

    join: whether the ranks are in a process group before the file is run.
    """
    results = attempt(work, path, join=join, file=path, limit_s=90.0)
    if failures := [result for result in results if isinstance(result, Failure)]:
        # The others follow from the first one, where ranks wait for each other.
        return [(False, explain(min(failures, key=lambda failure: failure.at_s)))]
    return [(ok, text if ok else f"{text}: {found}") for ok, text, found in judge(results)]


def has_left():
    """Whether this rank has left its process group; if not, it leaves it now."""
    left = not dist.is_initialized()
    if not left:
        dist.destroy_process_group()
    return left


def explain(failure):
    """What a failure of a rank means."""
    place = f", line {failure.line}" if failure.line else ""
    kind, _, detail = failure.text.partition(": ")
    if kind == "NotImplementedError":
        return f"{detail or 'a function'} is not completed{place}"
    if kind == "MissingError":
        return f"rank {failure.rank}: {detail}{place}"
    what = "stopped"
    if kind != "TypeError" and ALONE.search(failure.text):
        what = "waited for the other rank, which did not come"
    return f"rank {failure.rank} {what}{place}: {failure.text}"


def by_rank(values):
    """Values of the ranks for a reader: `3 on rank 0, 5 on rank 1`."""
    if len({str(value) for value in values}) == 1:
        return f"{values[0]} on every rank"
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def main(work, judge, join=True):
    """Check the file that the command line names; end with 4 where something is wrong."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: python {sys.argv[0]} FILE, the file that you completed")
    remarks = check(str(Path(sys.argv[1]).resolve()), work, judge, join)
    for ok, text in remarks:
        print("ok   " if ok else "WRONG", text)
    wrong = sum(not ok for ok, _ in remarks)
    print(f"{sys.argv[1]}: {wrong} wrong" if wrong else f"{sys.argv[1]}: all is right")
    sys.exit(4 if wrong else 0)
