"""The faults of a drill, what a run under one left, and the table of the results.

A row of drill.csv is read from the run's files; --list prints the faults.
"""

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.launch.slurm_options import Options
from jobkit.metric.reader import read_file
from jobkit.outcome.evidence import START_MARK
from jobkit.paths import RunPaths, write_json, write_whole

if TYPE_CHECKING:
    from rich.console import Console

TIME_LIMIT_MIN = 2  # with one, Slurm's shortest, a loaded machine does not reach the injection


@dataclass(frozen=True)
class FaultCase:
    """One fault: how it is injected, what it needs, and the expected status."""

    name: str
    text: str  # what happens
    first: tuple[str, ...]  # the accepted statuses of the attempt that it hits
    kind: str = "hold"  # JOBKIT_FAULT's: what the payload does to itself; hold: it pauses
    where: tuple[str, ...] = ("slurm", "here")
    needs: str = ""  # urgent: a partition that preempts; processes: of the ranks, on this machine
    settings: dict[str, object] = field(default_factory=dict)  # beside the drill's own
    options: Options = field(default_factory=dict)  # of sbatch, for the first start
    action: str = ""  # from outside, once the rank pauses: FaultRun.inject


_FAILED, _PREEMPTED, _SLURM = ("failed",), ("preempted",), ("slurm",)
_LIMIT = f"the time limit ({TIME_LIMIT_MIN} minutes) is reached"
_PREEMPTS = "a job of a partition with higher priority preempts the run"
_CASES = (
    FaultCase("kill", "a rank is killed (SIGKILL)", _FAILED, kind="kill"),
    FaultCase("raise", "a rank raises an exception", _FAILED, kind="raise"),
    FaultCase("hang", "a rank hangs; --timeout-s 60", _FAILED, kind="hang",
              settings={"timeout_s": 60.0}),  # of a collective that a rank does not join
    FaultCase("warning", "USR2, the warning signal before a time limit", _PREEMPTED, action="warn"),
    FaultCase("term", "SIGTERM to the ranks (on Slurm: to the job step)", _PREEMPTED,
              action="term"),
    FaultCase("scancel", "the job is cancelled with scancel", ("cancelled",), where=_SLURM,
              action="cancel"),
    FaultCase("time-limit", _LIMIT, ("timeout",), where=_SLURM, action="limit",
              options={"time": str(TIME_LIMIT_MIN)}),
    FaultCase("preemption", _PREEMPTS, _PREEMPTED, where=_SLURM, needs="urgent", action="preempt",
              options={"exclusive": True}),
)  # fmt: skip
FAULTS = {fault.name: fault for fault in _CASES}


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
    starts = records(paths, attempt, "startup")
    return float(starts[0]["t"]) if starts else None


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
    compared = []
    for row in rows:
        equal = same.get(str(folder / row.fault))
        unknown = row.possible and equal is None and not row.note
        note = "its parameters could not be compared" if unknown else row.note
        compared.append(replace(row, same_parameters=equal, note=note))
    return compared


_YES = {True: "yes", False: "no", None: ""}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one row per fault; an unknown value is empty."""
    names = [f.name for f in fields(Row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in asdict(row).items()}
        writer.writerow({**cells, "same_parameters": _YES[row.same_parameters]})
    write_whole(path, text.getvalue())


def show(rows: Sequence[Row], console: "Console") -> None:
    """Print the table, then the notes on single faults."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("fault", no_wrap=True)
    table.add_column("attempt 0", no_wrap=True)
    table.add_column("final status", no_wrap=True)
    for name in ("detected", "restart", "redone", "bitwise equal", "leaked"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.possible:
            table.add_row(*_words(row), style="" if row.good else "red")
        else:
            table.add_row(row.fault, Text("not possible here", style="dim"))
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.fault}: {row.note}", soft_wrap=True)
    console.print(
        "detected: from the fault to the end of attempt 0. restart: from the next start to its\n"
        "first iteration. redone: iterations computed again. bitwise equal: parameters, compared\n"
        "with the reference run. leaked: processes left behind",
        soft_wrap=True,
    )


def _words(row: Row) -> list[str]:
    then = f"{row.final_status}, {row.attempts} attempts" if row.attempts > 1 else row.final_status
    orphans = "unknown" if row.orphans is None else str(row.orphans)
    lost = "" if row.iterations_lost is None else str(row.iterations_lost)
    times = ["" if s is None else f"{s:.1f} s" for s in (row.detected_s, row.restart_s)]
    return [row.fault, row.first_status, then, *times, lost, _YES[row.same_parameters], orphans]


def listing() -> str:
    """Return the list of faults and their needs, one per line."""
    width = max(map(len, FAULTS))
    lines = []
    for name, fault in FAULTS.items():
        needs = "" if "here" in fault.where else " (needs Slurm)"
        if fault.needs == "urgent":
            needs = " (needs --urgent-partition, or a minicluster with --preemption)"
        lines.append(f"  {name:<{width}}  {fault.text}{needs}")
    return "\n".join(lines)
