"""What all checks share: remarks, the learner's file, and what to say when a rank fails."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from jobkit.exercise.ranks import Failure, attempt

_LIMIT_S = 90.0
# What Gloo says when another rank has ended, or does not come.
_ALONE = re.compile(r"timed? ?out|connection (closed|reset)|peer", re.IGNORECASE)


@dataclass(frozen=True)
class Remark:
    """One thing that was checked: whether it is right, and what was seen."""

    ok: bool
    text: str


def remark(ok: bool, right: str, wrong: str) -> Remark:
    """A remark with the text for its outcome."""
    return Remark(ok, right if ok else wrong)


class MissingError(Exception):
    """The file lacks a function."""


def load(path: str, *names: str) -> ModuleType:
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


def check(
    path: str,
    work: Callable[..., Any],
    judge: Callable[[Sequence[Any]], list[Remark]],
    join: bool = True,
) -> list[Remark]:
    """Run work(rank, path) on two ranks; return what the judge says of their results.

    join: whether the ranks are in a process group before the file is run.
    """
    found = attempt(work, path, join=join, file=path, limit_s=_LIMIT_S)
    failures = [each for each in found if isinstance(each, Failure)]
    return _of_failures(failures) if failures else judge(found)


def _of_failures(failures: Sequence[Failure]) -> list[Remark]:
    """The first failure; the others follow from it where ranks wait for each other."""
    first = min(failures, key=lambda f: f.at_s)
    where = f", line {first.line}" if first.line else ""
    if first.kind == "NotImplementedError":
        what = first.text.partition(": ")[2] or "a function"
        return [Remark(False, f"{what} is not completed{where}")]
    if first.kind in ("MissingError", "WrongPlaceError"):
        return [Remark(False, f"rank {first.rank}: {first.text.partition(': ')[2]}{where}")]
    if first.kind != "TypeError" and _ALONE.search(first.text):
        text = f"rank {first.rank} waited for the other rank, which did not come{where}"
        return [Remark(False, text), Remark(False, f"its error: {first.text}")]
    return [Remark(False, f"rank {first.rank} stopped{where}: {first.text}")]


def each_rank(values: Sequence[Any]) -> str:
    """Values of the ranks for a reader: `3 on rank 0, 5 on rank 1`."""
    if len({str(v) for v in values}) == 1:
        return f"{values[0]} on every rank"
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
