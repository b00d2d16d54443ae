"""The result of a run under a fault, read from its files: a row of drill.csv."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.metric.reader import read_file
from jobkit.outcome.evidence import START_MARK
from jobkit.paths import RunPaths, write_json


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run under one fault. Times in seconds; None: unknown, or not applicable."""

    fault: str
    where: str = ""  # nodes of the first start, or "here"
    first_status: str = ""  # of the attempt that the fault hit
    evidence: str = ""  # the line that proves it
    final_status: str = ""
    attempts: int = 0
    detected_s: float | None = None  # from the fault to the attempt's end, as the launcher saw it
    restart_s: float | None = None  # from the next attempt's start to its first iteration
    iterations_lost: int | None = None
    same_parameters: bool | None = None  # as in the run without a fault, bitwise equal
    orphans: int | None = None  # leaked processes; None: cannot be observed
    note: str = ""

    @property
    def possible(self) -> bool:
        """Whether the fault could be injected here."""
        return bool(self.where)

    @property
    def good(self) -> bool:
        """Whether the run recovered: ok, not known to differ, no leaked process, no note."""
        if not self.possible:
            return True
        fine = self.final_status == "ok" and self.same_parameters is not False
        return fine and not self.orphans and not self.note


def first_attempt(paths: RunPaths, ended: float | None) -> RunPaths:
    """Return a copy of the first attempt's files, without those of later attempts.

    ended: when its launcher saw it end, in Unix seconds.
    """
    early = RunPaths(paths.folder / ".first" / paths.folder.name)
    shutil.rmtree(early.folder, ignore_errors=True)
    early.folder.mkdir(parents=True)
    log = paths.log.read_text(errors="replace") if paths.log.exists() else ""
    early.log.write_text(log.split(f"{START_MARK}: attempt 1 ")[0])
    for path in (paths.metrics(0), paths.outcome(0)):
        if path.exists():
            copy = early.folder / path.relative_to(paths.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    write_json(early.job, {"launcher": "drill", "ended": ended, "started": 0.0, "pid": None})
    return early


def records(paths: RunPaths, attempt: int, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind that an attempt wrote."""
    path = paths.metrics(attempt)
    if not path.exists():
        return []
    with path.open("rb") as stream:
        return [r for r in read_file(stream) if isinstance(r, dict) and r.get("kind") == kind]


def startup(paths: RunPaths, attempt: int) -> float | None:
    """Return when an attempt was ready for its first iteration, in Unix seconds; None: never."""
    found = records(paths, attempt, "startup")
    return float(found[0]["t"]) if found else None


def lost_iterations(paths: RunPaths, injected: int) -> int:
    """Return the iterations computed again: those that attempt 0 reached, less those loaded."""
    numbers = paths.attempt_numbers()
    if len(numbers) < 2:
        return 0
    done = [r for r in records(paths, numbers[0], "checkpoint") if r["action"] == "saved"]
    reached = max([injected, *(int(r["iteration"]) for r in done)])
    loaded = [r for r in records(paths, numbers[1], "checkpoint") if r["action"] == "loaded"]
    return reached - (int(loaded[0]["iteration"]) if loaded else 0)


def with_parameters(rows: list[Row], same: Mapping[str, bool | None], folder: Path) -> list[Row]:
    """Return the rows with the result of comparing their runs' parameters, which all must have."""
    found = []
    for row in rows:
        equal = same.get(str(folder / row.fault))
        unknown = row.possible and equal is None and not row.note
        note = "its parameters could not be compared" if unknown else row.note
        found.append(replace(row, same_parameters=equal, note=note))
    return found
