"""What a study says, for a terminal and, as JSON, for a program."""

import dataclasses
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size, sizes

_WIDE = 200  # columns where no terminal says how many it has: nothing is cut in a file
_NONE = "-"


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the table of sizes, then every run that is not ok and why, then faults of the logs."""
    console = console or terminal()
    total, ok = len(results.runs), int((results.runs["status"] == "ok").sum())
    console.print(Text(f"{results.name}: {ok} of {total} runs ok"))
    found = sizes(results.runs)
    console.print(_table(found))
    for line in _bases(found):
        console.print(Text(line), soft_wrap=True)
    console.print(Text("medians over the repeats that are ok (slowest and fastest in brackets)"))
    for row in _not_ok(results):
        shown = f"{row['status']:9} {row['run_id']}: {row['reason']}"
        console.print(Text(shown), soft_wrap=True)
        if row["evidence"] and row["evidence"] not in (row["reason"] or ""):
            console.print(Text(f"{'':9} {row['evidence_file']}: {row['evidence']}"), soft_wrap=True)
    for line in results.warnings():
        console.print(Text(f"warning: {line}"), soft_wrap=True)


def terminal() -> Console:
    """The terminal, or a wide page where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def as_json(results: Results) -> str:
    """The same as JSON, at full precision; null for what is not known."""
    content = {
        "study": results.name,
        "folder": str(results.folder),
        "ok": results.ok,
        "runs": len(results.runs),
        "runs_ok": int((results.runs["status"] == "ok").sum()),
        "sizes": [dataclasses.asdict(size) for size in sizes(results.runs)],
        "not_ok": _not_ok(results),
        "warnings": results.warnings(),
        "rejected": [dataclasses.asdict(reject) for reject in results.rejected],
        "lost": dict(results.lost),
    }
    return json.dumps(content, indent=1)


def _not_ok(results: Results) -> list[dict[str, Any]]:
    """The runs that are not ok, and what proves it."""
    frame = results.runs[results.runs["status"] != "ok"]
    names = ["run_id", "status", "reason", "evidence", "evidence_file"]
    rows = frame[names].astype(object).where(frame[names].notna(), None)
    return [{str(k): v for k, v in row.items()} for row in rows.to_dict("records")]


def _table(found: list[Size]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("series", overflow="fold")
    for head in ("ranks", "ok", "time/epoch", "speed-up", "efficiency", "memory", "accuracy"):
        table.add_column(head, justify="right", no_wrap=True)
    last = None
    for size in found:
        cells = [
            _shape(size),
            f"{size.ok} of {size.planned}",
            _time(size),
            _say(size.speed_up, "{:.2f}"),
            _say(size.efficiency, "{:.0%}"),
            _say(size.peak_memory_mib, "{:,.0f} MiB"),
            _say(size.val_accuracy, "{:.1%}"),
        ]
        series = f"{size.series} ({size.scaling} scaling)" if size.scaling else size.series
        table.add_row(Text(series if size.series != last else ""), *map(Text, cells))
        last = size.series
    return table


def _bases(found: list[Size]) -> list[str]:
    """A line for each series whose smallest measured size is not one rank."""
    bases = {s.series: s.base_world_size for s in found if (s.base_world_size or 1) > 1}
    return [f"{k}: speed-up and efficiency relative to {n} ranks" for k, n in bases.items()]


def _shape(size: Size) -> str:
    """The ranks in all and, on several nodes, how they lie."""
    if size.world_size is None:
        return _NONE
    on_nodes = f" ({size.nodes}x{size.ranks_per_node})" if (size.nodes or 1) > 1 else ""
    return f"{size.world_size}{on_nodes}"


def _time(size: Size) -> str:
    """The median time of an epoch, and its range where it was measured more than once."""
    if size.time_per_epoch_s is None:
        return _NONE
    median = f"{size.time_per_epoch_s:.4g} s"
    if len(size.times_per_epoch_s) < 2:
        return median
    return f"{median} [{min(size.times_per_epoch_s):.4g}, {max(size.times_per_epoch_s):.4g}]"


def _say(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)
