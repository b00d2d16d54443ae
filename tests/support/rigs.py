"""What the payload's tests share: a run's records, the environment, processes."""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.metric.kinds import Record
from jobkit.paths import RunPaths, read_json
from support.place import ROOT
from support.records import records_of

RUN_SH = ("bash", str(ROOT / "run.sh"))
# Without profiled steps, which would be most of so short a run: test_measure.py has them.
NO_BREAKDOWN = ("--why", "0")
SMALL = ("--dataset", "synthetic", "--train-samples", "512", "--test-samples", "200", *NO_BREAKDOWN)


@dataclass
class Result:
    """What a run left."""

    codes: list[int | None]
    out: str  # of all ranks, one after the other
    paths: RunPaths

    def records(self, kind: str, attempt: int = 0) -> list[Record]:
        return records_of(self.paths.metrics(attempt), kind)

    def record(self, kind: str) -> Record:
        """The one record of a kind."""
        found = self.records(kind)
        assert found, f"no {kind} in {self.paths.folder}:\n{self.out}"
        return found[0]

    def losses(self) -> list[float]:
        """Training and validation loss of each epoch."""
        return [r[name] for r in self.records("epoch") for name in ("train_loss", "val_loss")]

    @property
    def outcome(self) -> dict[str, Any] | None:
        return read_json(self.paths.outcome(0))


Start = Callable[..., Result]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a started process: the tests' Python first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **extra}


def processes_with(word: object) -> list[int]:
    """The ids of the processes with a word, such as a folder, in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(word) in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found
