"""The program that a drill starts: jobkit's own training, or a command of the user's.

The training injects some faults into itself, and pauses for those from outside. A command knows of
none: it is hit some seconds after its start.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.drill.faults import REFERENCE, FaultCase, Row
from jobkit.drill.places import Size, Started
from jobkit.launch.command import clean_environment, python_path
from jobkit.metric.reader import read_file
from jobkit.paths import RunPaths
from jobkit.spec.command import CommandSpec, PlannedRun
from jobkit.spec.runspec import RunSpec

# 64 iterations, with a checkpoint at every tenth and in the end.
TRAINING: dict[str, Any] = {
    "strategy": "ddp",
    "model": "mlp",
    "dataset": "synthetic",
    "train_samples": 2000,
    "test_samples": 256,
    "global_batch_size": 64,
    "epochs": 2,
    "threads": 1,
    "checkpoint_every": "10",
    "why": 0,
}
AT = 25  # the iteration after which the fault comes: after two checkpoints, well before the end


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the drill starts, and when the fault hits it."""

    after_s: float = 0.0  # seconds from a command's start to the fault: half of its time
    words: tuple[str, ...] = ()  # the command; empty: jobkit's training
    device: str = "cpu"  # of the training
    minutes: int = 10  # the time limit of a job

    def does_itself(self, fault: FaultCase) -> bool:
        return fault.itself and not self.words

    def spec(self, size: Size, fault: FaultCase) -> PlannedRun:
        if self.words:
            return CommandSpec(command=self.words, **size)  # type: ignore[arg-type]
        on_gpu = {"deterministic": True} if self.device == "cuda" else {}
        return RunSpec(**{**TRAINING, "device": self.device, **on_gpu, **fault.settings, **size})

    def environment(self, fault: FaultCase) -> dict[str, str]:
        """The variables that tell the training of the fault."""
        if self.words or fault == REFERENCE:
            return {}
        # Rank 1 injects the fault itself; rank 0 pauses for one from outside.
        kind, rank = (fault.name, 1) if fault.itself else ("hold", 0)
        return {"JOBKIT_FAULT": f"{kind}@{AT}:{rank}"}

    def reached(self, paths: RunPaths, started: Started) -> bool:
        """Whether the first attempt is where the fault comes."""
        if not self.words:
            return paths.fault_marker(0).exists()
        return bool(started.begins) and time.time() - started.begins[0] >= self.after_s

    def where(self) -> str:
        return f"{self.after_s:.1f} s" if self.words else f"iteration {AT}"

    def redone(self, paths: RunPaths) -> int | None:
        """The iterations of the training that the second attempt did again; None: not known.

        Those that the first reached, less those that were loaded.
        """
        if self.words or len(paths.attempt_numbers()) < 2:
            return None
        first, second = (records(paths, attempt, "checkpoint") for attempt in (0, 1))
        done = [int(r["iteration"]) for r in first if r["action"] == "saved"]
        loaded = [int(r["iteration"]) for r in second if r["action"] == "loaded"]
        return max([AT, *done]) - (loaded[0] if loaded else 0)

    def deviation(self, fault: FaultCase, status: str) -> str:
        """What was not as expected of the attempt that the fault hit, by its status; or empty."""
        if self.words:
            return "the attempt went on to its end as if there had been no fault" * (status == "ok")
        return "" if status == fault.first else f"expected {fault.first}"

    def compared(self, rows: list[Row], reference: Path) -> list[Row]:
        """The rows with the training's parameters compared with those of the reference."""
        if self.words:
            return rows
        # In a process of its own, as the drill works without torch.
        runs = [str(reference.parent / row.fault) for row in rows if row.possible]
        words = [sys.executable, "-m", "jobkit.checks.compare", str(reference), *runs]
        env = {**clean_environment(os.environ), "PYTHONPATH": python_path()}
        said = subprocess.run(words, env=env, capture_output=True, text=True).stdout
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        same = {Path(one["run"]).name: one["same"] for one in found}
        for i, row in enumerate(rows):
            equal = same.get(row.fault)
            unknown = row.possible and equal is None and not row.note
            note = "its parameters could not be compared" if unknown else row.note
            rows[i] = replace(row, same_parameters=equal, note=note)
        return rows


def records(paths: RunPaths, attempt: int, kind: str) -> list[dict[str, Any]]:
    """The records of one kind that an attempt wrote."""
    path = paths.metrics(attempt)
    if not path.exists():
        return []
    with path.open("rb") as stream:
        return [r for r in read_file(stream) if isinstance(r, dict) and r.get("kind") == kind]


def began(paths: RunPaths, attempt: int) -> float | None:
    """When an attempt was at its first iteration, in Unix seconds; None: not known.

    A command's own start-up is known only as far as the measuring saw it.
    """
    found = records(paths, attempt, "startup") or records(paths, attempt, "run_start")
    return found[0]["t"] - (found[0].get("first_step_s") or 0.0) if found else None
