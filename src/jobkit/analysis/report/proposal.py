"""The scaling table for a compute-time proposal: sizes, times, speed-up, efficiency, cost."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from jobkit.analysis.scaling.scaling import RULE
from jobkit.analysis.scaling.sizes import EPOCH
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import (
    TextTable,
    computing,
    say,
    say_accuracy,
    time_head,
    with_interval,
)


def proposal_table(table: pd.DataFrame, unit: str) -> TextTable:
    """The scaling of a study, a row for each series and size. unit: GPUs, or processes (ranks)."""
    time = time_head(table)
    heads = ["series", "scaling", unit, "nodes", time, "speed-up", "efficiency"]
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    per = time.removeprefix("time ").removesuffix(" (s)")
    heads += [f"{hours} {per}", f"node-hours {per}", *_accuracy_head(table)]
    energy = _energy_columns(table, per)
    rows = [
        [*_row(row, unit, len(heads) == 10), *(say(row[name], "{:.3g}") for name in energy)]
        for row in records(table)
    ]
    return TextTable([*heads, *energy.values()], rows, 2, notes(table))


def _energy_columns(table: pd.DataFrame, per: str) -> dict[str, str]:
    """The columns of energy that were measured, with their heads; none of different scopes."""
    scopes, units = (sorted(table[k].dropna().unique()) for k in ("joules_of", "throughput_unit"))
    if len(scopes) != 1:
        return {}
    target = table["target_accuracy"].dropna()
    work = units[0].partition("/")[0].removesuffix("s") if len(units) == 1 else "unit of work"
    goal = f"{say_accuracy(target.iloc[0], 0)} accuracy" if len(target) else ""
    heads = {
        "joules_per_work": f"J per {work} ({scopes[0]})",
        "energy_kwh": f"kWh {per}",
        "kwh_to_accuracy": f"kWh to {goal}" if goal else "",
    }
    return {name: head for name, head in heads.items() if table[name].notna().any()}


def notes(table: pd.DataFrame) -> list[str]:
    """The table's notes: the baseline, and the intervals in brackets."""
    lines = [f"Speed-up and efficiency are relative to {RULE}."]
    origins = sorted(table["spread_from"].dropna().unique())
    if origins:
        lines.append(
            "In brackets: 95% interval of the median over runs, from the spread between repeats "
            f"({'; '.join(origins)}) by Student's t."
        )
    elif table["throughput"].notna().any():
        lines.append("No size has two successful repeats, so differences may be noise.")
    return lines


def _accuracy_head(table: pd.DataFrame) -> list[str]:
    target = table["target_accuracy"][table["time_of"] == EPOCH].dropna()
    return [f"time to {say_accuracy(target.iloc[0], 0)} accuracy (s)"] if len(target) else []


def _row(row: Mapping[str, Any], unit: str, accuracy: bool) -> list[str]:
    cells = [
        say(row["series"]),
        say(row["scaling"]),
        say(computing(row, unit)),
        say(row["nodes"]),
        with_interval(row, "time", "{:.4g}", "_s"),
        with_interval(row, "speed_up", "{:.2f}"),
        with_interval(row, "efficiency", "{:.0%}"),
        say(row["gpu_hours"], "{:.3g}"),
        say(row["node_hours"], "{:.3g}"),
    ]
    return [*cells, say(row["time_to_accuracy_s"], "{:.4g}")] if accuracy else cells
