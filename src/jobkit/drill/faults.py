"""The faults of a drill, what a run under one left, and the table of the results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.launch.slurm_options import Options
from jobkit.outcome.evidence import START_MARK, of_newest
from jobkit.outcome.state import Facts, RunState, judge, read_ending
from jobkit.paths import RunPaths, write_whole

if TYPE_CHECKING:
    from rich.console import Console

TIME_LIMIT_MIN = 2  # with one, Slurm's shortest, a loaded machine does not reach the injection


@dataclass(frozen=True)
class FaultCase:
    """One fault: how it is injected, and the expected status."""

    name: str
    text: str  # what happens
    first: str  # the status of the attempt that it hits
    itself: bool = False  # the training does it to itself; else it pauses for the drill to do it
    settings: dict[str, object] = field(default_factory=dict)  # beside the drill's own
    options: Options = field(default_factory=dict)  # of sbatch, for the first start


FAULTS = {fault.name: fault for fault in (
    FaultCase("kill", "a rank is killed (SIGKILL)", "failed", itself=True),
    FaultCase("raise", "a rank raises an exception", "failed", itself=True),
    FaultCase("hang", "a rank hangs; --timeout-s 60", "failed", itself=True,
              settings={"timeout_s": 60.0}),  # of a collective that a rank does not join
    FaultCase("warning", "USR2, the warning signal before a time limit", "preempted"),
    FaultCase("term", "SIGTERM to the ranks (on Slurm: to the job step)", "preempted"),
    FaultCase("scancel", "the job is cancelled with scancel", "cancelled"),
    FaultCase("time-limit", f"the time limit ({TIME_LIMIT_MIN} minutes) is reached", "timeout",
              options={"time": str(TIME_LIMIT_MIN)}),
    FaultCase("preemption", "a job of a partition with higher priority preempts the run",
              "preempted", options={"exclusive": True}),
)}  # fmt: skip
REFERENCE = FaultCase("reference", "", "ok")  # the run without a fault


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
    iterations_lost: int | None = None  # of the training
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
        fine = self.final_status == "ok" and self.same_parameters is not False
        return not self.possible or (fine and not self.orphans and not self.note)


def first_state(paths: RunPaths, ended: float | None) -> RunState:
    """Return the state of the first attempt, by its files without those of later attempts.

    ended: when its launcher saw it end, in Unix seconds.
    """
    log = paths.log.read_text(errors="replace") if paths.log.exists() else ""
    lines = log.split(f"{START_MARK}: attempt 1 ")[0].split("\n")
    return judge(Facts(
        run_id=paths.folder.name, job={"ended": ended}, alive=False if ended else None, attempt=0,
        ending=read_ending(paths, 0), tails={paths.log.name: of_newest(lines, 0)},
    ))  # fmt: skip


_YES = {True: "yes", False: "no", None: ""}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one row per fault; an unknown value is empty."""
    import pandas as pd  # --help needs none

    table = pd.DataFrame(map(asdict, rows)).convert_dtypes()
    table["same_parameters"] = [_YES[row.same_parameters] for row in rows]
    write_whole(path, table.to_csv(index=False, float_format="%.3f"))


def show(rows: Sequence[Row], console: "Console") -> None:
    """Print the table, then the notes on single faults."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("fault", "attempt 0", "final status"):
        table.add_column(name, no_wrap=True)
    for name in ("detected", "restart", "redone", "bitwise equal", "leaked"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if not row.possible:
            table.add_row(row.fault, Text("not possible here", style="dim"))
            continue
        again = f", {row.attempts} attempts" if row.attempts > 1 else ""
        times = ["" if s is None else f"{s:.1f} s" for s in (row.detected_s, row.restart_s)]
        lost = "" if row.iterations_lost is None else str(row.iterations_lost)
        leaked = "unknown" if row.orphans is None else str(row.orphans)
        cells = [row.fault, row.first_status, row.final_status + again, *times, lost]
        table.add_row(*cells, _YES[row.same_parameters], leaked, style="" if row.good else "red")
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
