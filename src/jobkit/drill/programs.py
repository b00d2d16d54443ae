"""The program that a drill starts: jobkit's own training, or a command of the user's.

The training injects some faults into itself, and pauses for those from outside. A command knows of
none: it is hit while it runs, once it has recorded so many steps or has run for so many seconds.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.drill.faults import REFERENCE, TIME_LIMIT_MIN, FaultCase, Row, records
from jobkit.drill.places import Size, Started
from jobkit.errors import UsageError
from jobkit.launch.command import clean_environment, python_path
from jobkit.metric.kinds import TAG
from jobkit.metric.reader import scan
from jobkit.outcome.evidence import START_MARK
from jobkit.outcome.logs import TAIL_BYTES, read_tail
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
FIRST, LAST = 21, 60  # after two checkpoints, and some iterations before the end
_ATTEMPT = re.compile(rf"{re.escape(START_MARK)}: attempt ([0-9]{{1,9}})\b")
_NEWEST_BYTES = 64 << 10  # of the log: the newest step is there


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the drill starts, and when the fault hits it."""

    at: int  # the iteration, or the step that a command records, after which the fault comes
    after_s: float | None = None  # seconds from a command's start, in place of a step
    words: tuple[str, ...] = ()  # the command; empty: jobkit's training
    device: str = "cpu"  # of the training
    minutes: int = 10  # the time limit of a job

    def case(self, fault: FaultCase) -> FaultCase:
        """How a fault is injected into this program."""
        if self.words and fault.name in ("kill", "hang"):
            return replace(fault, action=fault.name)
        return fault

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
        kind, rank = ("hold", 0) if fault.action else (fault.name, 1)
        return {"JOBKIT_FAULT": f"{kind}@{self.at}:{rank}"}

    def reached(self, paths: RunPaths, started: Started) -> bool:
        """Whether the first attempt is where the fault comes."""
        if not self.words:
            return paths.fault_marker(0).exists()
        if self.after_s is None:
            return max(steps_of(paths, 0, _NEWEST_BYTES), default=0) >= self.at
        return bool(started.begins) and time.time() - started.begins[0] >= self.after_s

    def where(self) -> str:
        if self.after_s is not None:
            return f"after {self.after_s:g} s"
        return f"after {'step' if self.words else 'iteration'} {self.at}"

    def check_reference(self, paths: RunPaths, took_s: float) -> None:
        """Raise UsageError where the command without a fault ends before the fault would come."""
        if self.after_s is not None and took_s <= self.after_s:
            raise UsageError(f"--after {self.after_s:g}: the command took {took_s:.0f} s")
        if self.words and self.after_s is None:
            last = max(steps_of(paths, 0), default=None)
            if last is None:
                raise UsageError("the command recorded no step: say when, as --after SECONDS")
            if last <= self.at:
                raise UsageError(f"--at {self.at}: the command made {last} steps: say fewer")

    def too_short(self, fault: FaultCase, took_s: float) -> str:
        """Why a command ends before a fault's time limit, by its time without one; or empty."""
        minutes = TIME_LIMIT_MIN + 1  # Slurm ends a job up to a minute after its limit
        if self.words and fault.name == "time-limit" and took_s < 60 * minutes:
            return f"the command took {took_s:.0f} s; it must run for {minutes} minutes or more"
        return ""

    def redone(self, paths: RunPaths) -> int | None:
        """The iterations that the second attempt did again; None: not known.

        Of the training: those that the first reached, less those that were loaded. Of a command: by
        the numbers in [METRIC] lines, as a meter counts from 1 in each attempt. Where not each step
        has a line, the second may have begun up to a line's steps before the first that it printed.
        """
        if self.words:
            before, then = (printed_steps(paths, attempt) for attempt in (0, 1))
            if not before or not then:
                return None
            return max(0, max(before) - then[0] + max(1, before[0]))
        if len(paths.attempt_numbers()) < 2:
            return 0
        first, second = (records(paths, attempt, "checkpoint") for attempt in (0, 1))
        done = [int(r["iteration"]) for r in first if r["action"] == "saved"]
        loaded = [int(r["iteration"]) for r in second if r["action"] == "loaded"]
        return max([self.at, *done]) - (loaded[0] if loaded else 0)

    def deviation(self, fault: FaultCase, status: str) -> str:
        """What was not as expected of the attempt that the fault hit, by its status; or empty."""
        if self.words:
            return "the attempt went on to its end as if there had been no fault" * (status == "ok")
        return "" if status == fault.first else f"expected {fault.first}"

    def compared(self, rows: list[Row], reference: Path) -> list[Row]:
        """The rows with the training's parameters compared with those of the reference."""
        if self.words:
            return rows
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


def began(paths: RunPaths, attempt: int) -> float | None:
    """When an attempt was at its first iteration, in Unix seconds; None: not known.

    A command's own start-up is known only as far as the measuring saw it.
    """
    found = records(paths, attempt, "startup") or records(paths, attempt, "run_start")
    return found[0]["t"] - (found[0].get("first_step_s") or 0.0) if found else None


def steps_of(paths: RunPaths, attempt: int, log_bytes: int = TAIL_BYTES) -> list[int]:
    """The steps that an attempt recorded: the ends of windows, else those of [METRIC] lines."""
    ends = [r.get("step") for r in records(paths, attempt, "window")]
    return [s for s in ends if type(s) is int] or printed_steps(paths, attempt, log_bytes)


def printed_steps(paths: RunPaths, attempt: int, log_bytes: int = TAIL_BYTES) -> list[int]:
    """The steps of an attempt's `[METRIC] step=N` lines, in the order of the log."""
    current, lines = None, []
    for _, line in read_tail(paths.log, log_bytes).lines:
        if mark := _ATTEMPT.search(line):
            current = int(mark[1])
        elif TAG in line and current in (None, attempt):
            lines.append(line)
    text = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    rows: list[Mapping[str, Any]] = [r for r in scan(text) if isinstance(r, dict)]
    return [r["step"] for r in rows if "v" not in r and type(r.get("step")) is int]
