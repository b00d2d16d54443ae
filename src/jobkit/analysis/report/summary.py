"""The summary of a study, for a terminal and, as JSON, for a program."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import unit
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.tables import thread_lines
from jobkit.analysis.scaling.sizes import EPOCH, IMAGES, Size
from jobkit.analysis.tables.frames import plain_records
from jobkit.analysis.tables.text import NONE, counted, rounded, say, say_accuracy

_WIDE = 200  # columns where there is no terminal: no line in a file is truncated
_HEADS = (
    "ranks",
    "runs\nok",
    "time per\n{} (s)",
    "speed-up",
    "parallel\nefficiency",
    "GPU\nbusy",
    "peak\nmemory\n(MiB)",
    "val.\naccuracy",
    "throughput,\nmean of steps",
)
_START_UP = ",\nstart-up included"  # of a run of which nothing but the wall time is known


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the table of sizes, every run that is not ok, and the warnings."""
    console = console or terminal()
    total, ok = len(results.runs), int((results.runs["status"] == "ok").sum())
    console.print(Text(f"{results.name}: {ok} of {total} runs ok"))
    console.print(_table(results.sizes))
    lines = ["median of successful repeats [min, max]", *_bases(results.sizes)]
    for line in [*lines, *thread_lines(results)]:
        console.print(Text(line), soft_wrap=True)
    for row in _not_ok(results):
        shown = f"{row['status']:9} {row['run_id']}: {row['reason']}"
        console.print(Text(shown), soft_wrap=True)
        if row["evidence"] and row["evidence"] not in (row["reason"] or ""):
            console.print(Text(f"{'':9} {row['evidence_file']}: {row['evidence']}"), soft_wrap=True)
    for line in results.warnings():
        console.print(Text(f"warning: {line}"), soft_wrap=True)


def terminal() -> Console:
    """The terminal, or a console of fixed width where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def as_json(results: Results) -> str:
    """The summary as JSON, at full precision; null for what is not known."""
    content = {
        "study": results.name,
        "folder": str(results.folder),
        "ok": results.ok,
        "runs": len(results.runs),
        "runs_ok": int((results.runs["status"] == "ok").sum()),
        "verdict": verdict(results, unit(results)),
        "sizes": [dataclasses.asdict(size) for size in results.sizes],
        "not_ok": _not_ok(results),
        "warnings": results.warnings(),
    }
    return json.dumps(content, indent=1)


def _not_ok(results: Results) -> list[dict[str, Any]]:
    """The runs that are not ok, with reason and evidence."""
    names = ["run_id", "status", "reason", "evidence", "evidence_file"]
    return plain_records(results.runs.loc[results.runs["status"] != "ok", names])


def _table(sizes: Sequence[Size]) -> Table:
    """The sizes; a column that is empty in all of them is not there."""
    of = " or ".join(dict.fromkeys(s.time_of for s in sizes)) or EPOCH
    heads = [head.format(of + _START_UP * (of == "run")) for head in _HEADS]
    other_units = any(s.time_of != EPOCH or s.throughput_unit != IMAGES for s in sizes)
    if any(s.throughput_unit.endswith("/h") for s in sizes):
        heads[-1] = "throughput"
    rows = [
        [
            _shape(size),
            f"{size.runs_ok} of {size.runs_planned}",
            _time(size),
            say(size.speed_up, "{:.2f}"),
            say(size.efficiency, "{:.0%}"),
            say(size.gpu_busy, "{:.0%}"),
            say(size.peak_memory_mib, "{:,.0f}"),
            say_accuracy(size.val_accuracy),
            say(
                (size.throughput and other_units and rounded(size.throughput)) or None,
                f"{{}} {size.throughput_unit}",
            ),
        ]
        for size in sizes
    ]
    shown = [i for i, cells in enumerate(zip(*rows, strict=True)) if i < 3 or {*cells} - {NONE}]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("series", overflow="fold")
    for i in shown:
        table.add_column(heads[i], justify="right", no_wrap=True)
    last = None
    for size, cells in zip(sizes, rows, strict=True):
        series = f"{size.series} ({size.scaling} scaling)" if size.scaling else size.series
        table.add_row(Text(series if size.series != last else ""), *(Text(cells[i]) for i in shown))
        last = size.series
    return table


def _bases(sizes: Sequence[Size]) -> list[str]:
    """A line for each series that is not compared with itself on one rank."""
    bases = {
        s.series: f"{s.base_series} on {counted(s.base_world_size or 0, 'rank')}"
        for s in sizes
        if s.speed_up and (s.base_series, s.base_world_size) != (s.series, 1)
    }
    return [f"{k}: speed-up and efficiency relative to {base}" for k, base in bases.items()]


def _shape(size: Size) -> str:
    """The number of ranks and, on several nodes, nodes x ranks per node."""
    if size.world_size is None:
        return NONE
    on_nodes = f" ({size.nodes}x{size.ranks_per_node})" if (size.nodes or 1) > 1 else ""
    return f"{size.world_size}{on_nodes}"


def _time(size: Size) -> str:
    """The median time of an epoch, with its range where there are several repeats."""
    median = say(size.time_s, "{:.4g}")
    if len(size.times_s) < 2:
        return median
    return f"{median} [{min(size.times_s):.4g}, {max(size.times_s):.4g}]"
