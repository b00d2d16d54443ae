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


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the table of sizes, every run that is not ok, and the warnings."""
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=_WIDE)
    content = _content(results)
    console.print(Text(f"{results.name}: {content['runs_ok']} of {content['runs']} runs ok"))
    console.print(_table(results.sizes))
    bases = {
        s.series: f"{s.base_series} on {counted(s.base_world_size or 0, 'rank')}"
        for s in results.sizes
        if s.speed_up and (s.base_series, s.base_world_size) != (s.series, 1)
    }
    lines = ["median of successful repeats [min, max]"]
    lines += [f"{k}: speed-up and efficiency relative to {base}" for k, base in bases.items()]
    lines += thread_lines(results)
    for row in content["not_ok"]:
        lines.append(f"{row['status']:9} {row['run_id']}: {row['reason']}")
        if row["evidence"] and row["evidence"] not in (row["reason"] or ""):
            lines.append(f"{'':9} {row['evidence_file']}: {row['evidence']}")
    for line in [*lines, *(f"warning: {line}" for line in content["warnings"])]:
        console.print(Text(line), soft_wrap=True)


def as_json(results: Results) -> str:
    """The summary as JSON, at full precision; null for what is not known."""
    content = {
        "study": results.name,
        "folder": str(results.folder),
        "verdict": verdict(results, unit(results)),
        **_content(results),
        "sizes": [dataclasses.asdict(size) for size in results.sizes],
    }
    return json.dumps(content, indent=1)


def _content(results: Results) -> dict[str, Any]:
    """What both forms of the summary have; of runs that are not ok reason and evidence."""
    ok = results.runs["status"] == "ok"
    names = ["run_id", "status", "reason", "evidence", "evidence_file"]
    return {
        "ok": results.ok,
        "runs": len(ok),
        "runs_ok": int(ok.sum()),
        "not_ok": plain_records(results.runs.loc[~ok, names]),
        "warnings": results.warnings(),
    }


def _table(sizes: Sequence[Size]) -> Table:
    """The sizes; a column that is empty in all of them is not there."""
    of = " or ".join(dict.fromkeys(s.time_of for s in sizes)) or EPOCH
    if of == "run":  # nothing but its wall time is known
        of = "run,\nstart-up included"
    other_units = any(s.time_of != EPOCH or s.throughput_unit != IMAGES for s in sizes)
    per_hour = any(s.throughput_unit.endswith("/h") for s in sizes)
    rows = [
        {
            "ranks": _shape(size),
            "runs\nok": f"{size.runs_ok} of {size.runs_planned}",
            f"time per\n{of} (s)": say(size.time_s, "{:.4g}")
            + (f" [{min(t):.4g}, {max(t):.4g}]" if len(t := size.times_s) > 1 else ""),
            "speed-up": say(size.speed_up, "{:.2f}"),
            "parallel\nefficiency": say(size.efficiency, "{:.0%}"),
            "GPU\nbusy": say(size.gpu_busy, "{:.0%}"),
            "peak\nmemory\n(MiB)": say(size.peak_memory_mib, "{:,.0f}"),
            "val.\naccuracy": say_accuracy(size.val_accuracy),
            "throughput" if per_hour else "throughput,\nmean of steps": (
                f"{rounded(size.throughput)} {size.throughput_unit}"
                if other_units and size.throughput
                else NONE
            ),
        }
        for size in sizes
    ]
    heads = list(rows[0]) if rows else []
    shown = [h for i, h in enumerate(heads) if i < 3 or {row[h] for row in rows} - {NONE}]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("series", overflow="fold")
    for head in shown:
        table.add_column(head, justify="right", no_wrap=True)
    last = None
    for size, row in zip(sizes, rows, strict=True):
        series = f"{size.series} ({size.scaling} scaling)" if size.scaling else size.series
        cells = [series if size.series != last else "", *(row[head] for head in shown)]
        table.add_row(*map(Text, cells))
        last = size.series
    return table


def _shape(size: Size) -> str:
    """The number of ranks and, on several nodes, nodes x ranks per node."""
    on_nodes = f" ({size.nodes}x{size.ranks_per_node})" if (size.nodes or 1) > 1 else ""
    return f"{say(size.world_size)}{on_nodes}"
