"""A drill's table: on the terminal and as drill.csv."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobkit.drill.faults import FAULTS
from jobkit.drill.row import Row
from jobkit.paths import write_whole

_YES = {True: "yes", False: "no", None: ""}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one row per fault; an unknown value is empty."""
    names = [f.name for f in fields(Row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: _cell(v) for k, v in asdict(row).items()})
    write_whole(path, text.getvalue())


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return _YES[value]
    return f"{value:.3f}" if isinstance(value, float) else value


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, then the notes on single faults."""
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
    times = [_seconds(row.detected_s), _seconds(row.restart_s)]
    return [row.fault, row.first_status, then, *times, lost, _YES[row.same_parameters], orphans]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def listing() -> str:
    """Return the list of faults and their needs, one per line."""
    width = max(map(len, FAULTS))
    lines = [f"  {name:<{width}}  {fault.text}{_asks(name)}" for name, fault in FAULTS.items()]
    return "\n".join(lines)


def _asks(name: str) -> str:
    if FAULTS[name].needs == "urgent":
        return " (needs --urgent-partition, or a minicluster with --preemption)"
    return "" if "here" in FAULTS[name].where else " (needs Slurm)"
