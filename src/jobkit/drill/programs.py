"""The programs that a drill starts: jobkit's own training, or a command of the user's.

The training injects some faults into itself, and pauses for those from outside. A command knows of
none: it is hit while it runs, once it has recorded so many steps or has run for so many seconds.
"""

import io
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.drill.faults import FaultCase, Row, lost_iterations, records, startup, with_parameters
from jobkit.drill.places import Size, Started, compare
from jobkit.errors import UsageError
from jobkit.launch.slurm_options import Options
from jobkit.metric.kinds import TAG
from jobkit.metric.reader import scan
from jobkit.outcome.evidence import START_MARK
from jobkit.outcome.logs import TAIL_BYTES, read_tail
from jobkit.paths import RunPaths
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import PlannedRun, RunSpec

# 64 iterations, with a checkpoint at every tenth and in the end.
TRAINING: dict[str, object] = {
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


class Training:
    """jobkit's own training."""

    def __init__(self, at: int, device: str) -> None:
        """at: the iteration after which the fault is injected. Raises UsageError."""
        if not FIRST <= at <= LAST:
            raise UsageError(f"--at {at}: must be from {FIRST} to {LAST}")
        on_gpu = {"deterministic": True} if device == "cuda" else {}
        self.at, self._settings = at, {**TRAINING, "device": device, **on_gpu}

    def case(self, fault: FaultCase) -> FaultCase:
        """How a fault is injected into this program."""
        return fault

    def impossible(self, fault: FaultCase) -> str:
        """Why a fault cannot be injected into this program; empty if it can."""
        return ""

    def spec(self, size: Size, fault: FaultCase) -> PlannedRun:
        return RunSpec(**{**self._settings, **fault.settings, **size})  # type: ignore[arg-type]

    def options(self) -> Options:
        return {}

    def environment(self, fault: FaultCase) -> dict[str, str]:
        """Return the variables that tell the program of the fault."""
        # Rank 1 injects the fault itself; rank 0 pauses for one from outside.
        rank = 0 if fault.kind == "hold" else 1
        return {"JOBKIT_FAULT": f"{fault.kind}@{self.at}:{rank}"} if fault.kind else {}

    def reached(self, paths: RunPaths, started: Started) -> bool:
        """Whether the first attempt is where the fault is injected."""
        return paths.fault_marker(0).exists()

    def where(self) -> str:
        return f"after iteration {self.at}"

    def check_reference(self, paths: RunPaths, took_s: float) -> None:
        """Every run of the training comes to the injection point."""

    def limited(self, fault: FaultCase, reference: RunPaths, took_s: float) -> FaultCase:
        return fault  # rank 0 pauses at the injection point, which it reaches in seconds

    def redone(self, paths: RunPaths) -> int | None:
        """Return the iterations that the second attempt did again."""
        return lost_iterations(paths, self.at)

    def began(self, paths: RunPaths, attempt: int) -> float | None:
        """Return when an attempt was at its first iteration, in Unix seconds; None: not known."""
        return startup(paths, attempt)

    def deviation(self, fault: FaultCase, status: str) -> str:
        """What was not as expected of the attempt that the fault hit, by its status."""
        return "" if status in fault.first else f"expected {' or '.join(fault.first)}"

    def compared(self, rows: list[Row], reference: Path) -> list[Row]:
        """Return the rows with the parameters compared with those of the reference."""
        folder = reference.parent
        tried = [folder / row.fault for row in rows if row.possible]
        return with_parameters(rows, compare(reference, tried), folder)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the user's, which is hit after so many steps, or after so many seconds."""

    words: Sequence[str]
    at: int
    after_s: float | None
    minutes: int  # the time limit of a job

    def case(self, fault: FaultCase) -> FaultCase:
        if fault.name not in ("kill", "hang"):
            return fault
        return replace(fault, kind="hold", needs="processes", action=fault.name)

    def impossible(self, fault: FaultCase) -> str:
        return "" if fault.kind == "hold" else "only jobkit's own training does this to itself"

    def spec(self, size: Size, fault: FaultCase) -> PlannedRun:
        return CommandSpec(command=tuple(self.words), **size)  # type: ignore[arg-type]

    def options(self) -> Options:
        return {"time": str(self.minutes)}

    def environment(self, fault: FaultCase) -> dict[str, str]:
        return {}

    def reached(self, paths: RunPaths, started: Started) -> bool:
        if self.after_s is None:
            return max(steps_of(paths, 0, _NEWEST_BYTES), default=0) >= self.at
        return bool(started.begins) and time.time() - started.begins[0] >= self.after_s

    def where(self) -> str:
        return f"after step {self.at}" if self.after_s is None else f"after {self.after_s:g} s"

    def check_reference(self, paths: RunPaths, took_s: float) -> None:
        """Raise UsageError where the run without a fault ends before the injection point."""
        if self.after_s is not None:
            if took_s <= self.after_s:
                raise UsageError(f"--after {self.after_s:g}: the command took {took_s:.0f} s")
            return
        last = max(steps_of(paths, 0), default=None)
        if last is None:
            raise UsageError("the command recorded no step: say when, as --after SECONDS")
        if last <= self.at:
            raise UsageError(f"--at {self.at}: the command made {last} steps: say fewer")

    def limited(self, fault: FaultCase, reference: RunPaths, took_s: float) -> FaultCase:
        """Return the fault with a time limit after the injection point, where it is one.

        Raises UsageError for a command that has ended by then, as the reference shows.
        """
        if "time" not in fault.options:
            return fault
        point_s = self.after_s
        if point_s is None:  # the start-up, which is no step, is within the minute that is added
            point_s = took_s * self.at / max(steps_of(reference, 0))
        minutes = math.ceil(point_s / 60) + 1
        if took_s < 60 * (minutes + 1):  # Slurm ends a job up to a minute after its limit
            raise UsageError(
                f"the command ran for {took_s:.0f} s; with the fault {self.where()} it must run "
                f"for at least {minutes + 1} minutes"
            )
        # A warning before the limit could come before the injection point.
        options = {**fault.options, "time": str(minutes), "signal": "CONT@1"}
        return replace(fault, options=options)

    def redone(self, paths: RunPaths) -> int | None:
        """By the numbers in [METRIC] lines: a meter counts from 1 in each attempt.

        Where not each step has a line, the second attempt may have begun up to a line's steps
        before the first that it printed.
        """
        before, then = (printed_steps(paths, attempt) for attempt in (0, 1))
        if not before or not then:
            return None
        return max(0, max(before) - then[0] + max(1, before[0]))

    def began(self, paths: RunPaths, attempt: int) -> float | None:
        begins = records(paths, attempt, "run_start")
        return float(begins[0]["t"]) if begins else None

    def deviation(self, fault: FaultCase, status: str) -> str:
        return "the attempt went on to its end as if there had been no fault" * (status == "ok")

    def compared(self, rows: list[Row], reference: Path) -> list[Row]:
        return rows


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
