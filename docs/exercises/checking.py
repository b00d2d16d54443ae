"""Run a learner's file on two ranks, and say what is wrong with it: checking.py NUMBER FILE.

A check has work(rank, path), which runs the file on a rank and returns for each promise whether it
is kept, the promise, and what was found.
"""

import importlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from ranks import RankError, on_ranks


def load(path, *names):
    """Run the learner's file; raise LookupError where it lacks one of the functions."""
    mine = SimpleNamespace(**runpy.run_path(path))
    for name in names:
        if not callable(getattr(mine, name, None)):
            raise LookupError(f"the file has no function {name}()")
    return mine


def check(number, path):
    """Run the check of an exercise on two ranks; return (is kept, text) of each promise."""
    work = importlib.import_module(f"check_{number.replace('.', '_')}").work
    try:
        promises = on_ranks(work, path, join=False, file=path, limit_s=90.0)[0]
    except RankError as error:
        place = f", line {error.line}" if error.line else ""
        kind, _, detail = error.text.partition(": ")
        if kind == "NotImplementedError":
            return [(False, f"{detail or 'a function'} is not completed{place}")]
        text = detail if kind == "LookupError" else error.text
        gloo = "(?i)timed? ?out|connection (closed|reset)|peer"  # when another rank does not come
        if kind != "TypeError" and re.search(gloo, text):
            text = f"waited for the other rank, which did not come: {text}"
        return [(False, f"rank {error.rank}{place}: {text}")]
    return [(ok, text if ok else f"{text}: {found}") for ok, text, found in promises]


def has_left():
    """Whether this rank has left its process group; if not, it leaves it now."""
    left = not dist.is_initialized()
    if not left:
        dist.destroy_process_group()
    return left


def by_rank(values):
    """Values of the ranks for a reader: `3 on rank 0, 5 on rank 1`."""
    if len({str(value) for value in values}) == 1:
        return f"{values[0]} on every rank"
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def main(*words):
    """Print what is right and wrong; return 4 where something is wrong, 2 for wrong usage."""
    numbers = sorted(path.stem for path in Path(__file__).parent.glob("skeletons/*.txt"))
    if len(words) != 2 or words[0] not in numbers or not Path(words[1]).is_file():
        print(f"usage: checking.py NUMBER FILE: one of {', '.join(numbers)}, and a file of yours")
        return 2
    remarks = check(words[0], str(Path(words[1]).resolve()))
    for ok, text in remarks:
        print("ok   " if ok else "WRONG", text)
    wrong = sum(not ok for ok, _ in remarks)
    print(f"{words[1]}: {wrong} wrong" if wrong else f"{words[1]}: all is right")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
