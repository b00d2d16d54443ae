"""The figures of throughput over sizes, and of the time to an accuracy, each with its ideal."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import ideal_line, legend, on_gpu, plot_line, unit
from jobkit.analysis.figures.scaling import interval_line, placement, rows_with_interval
from jobkit.analysis.figures.style import (
    GREY,
    PLAIN,
    log_axis,
    log_time_axis,
    looks,
    new_figure,
    size_axis,
)
from jobkit.analysis.figures.subtitle import subtitle

_KINDS = ("strong", "weak")


def throughput_figure(results: Results) -> Figure | None:
    """Images a second over all ranks, and beside it for each; a row for each kind of scaling."""
    table = _per_rank(results.scaling)
    kinds = _kinds(table, "images_per_s")
    if not kinds:
        return None
    title = f"{results.name}: throughput"
    figure, axes = new_figure(2, title, subtitle(results, "median"), rows=len(kinds))
    look = looks(table["series"].dropna())
    each = "GPU" if on_gpu(results) else "process"
    for i, kind in enumerate(kinds):
        rows, suffix = _known(table, "images_per_s", kind), _suffix(kind, kinds)
        total, single = axes[2 * i : 2 * i + 2]
        total.set_yscale("log")
        for name, line in _lines(rows):
            interval_line(total, line, "images_per_s", look[name])
            interval_line(single, line, "images_per_s_per_rank", look[name])
            _ideal_rates(total, single, line)
        log_axis(total.yaxis)
        total.set_ylabel(f"images/s{suffix}")
        single.set_ylim(0, 1.1 * single.get_ylim()[1])
        single.yaxis.set_major_formatter(PLAIN)
        single.set_ylabel(f"images/s per {each}{suffix}")
        for one in (total, single):
            size_axis(one, [int(n) for n in rows["world_size"]], unit(results))
    bars = [Line2D([], [], color=GREY, marker="|", ms=11, ls="", label="bootstrap interval")]
    legend(figure, axes, look, bars if rows_with_interval(table, "images_per_s") else [])
    return figure


def time_to_accuracy_figure(results: Results) -> Figure | None:
    """Training time to the accuracy of scaling.csv, over sizes; ideal: half at twice the ranks."""
    table = results.scaling
    kinds = _kinds(table, "time_to_accuracy_s")
    if not kinds:
        return None
    target = float(table["target_accuracy"].dropna().iloc[0])
    title = f"{results.name}: training time to {target:.0%} validation accuracy"
    figure, axes = new_figure(len(kinds), title, subtitle(results, "median"))
    look = looks(table["series"].dropna())
    for one, kind in zip(axes, kinds, strict=True):
        rows = _known(table, "time_to_accuracy_s", kind)
        one.set_yscale("log")
        for name, line in _lines(rows):
            x = line["world_size"].astype(float).to_numpy()
            y = line["time_to_accuracy_s"].astype(float).to_numpy()
            plot_line(one, x, y, look[name])
            at = np.geomspace(x[0], x[-1], 65)
            ideal_line(one, at, y[0] * x[0] / at)
        log_time_axis(one)
        size_axis(one, [int(n) for n in rows["world_size"]], unit(results))
        one.set_ylabel(f"time to {target:.0%} accuracy (s){_suffix(kind, kinds)}")
    legend(figure, axes, look)
    return figure


def _per_rank(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the ends of the interval of a rank's rate, too."""
    ends = {
        f"images_per_s_per_rank_{end}": table[f"images_per_s_{end}"] / table["world_size"]
        for end in ("low", "high")
    }
    return table.assign(**ends)


def _kinds(table: pd.DataFrame, name: str) -> list[str]:
    """The kinds of scaling of which two sizes or more have the value."""
    return [k for k in _KINDS if _known(table, name, k)["world_size"].nunique() > 1]


def _known(table: pd.DataFrame, name: str, kind: str) -> pd.DataFrame:
    wanted = (table["scaling"] == kind).fillna(False) & table[name].notna()
    return table[wanted & table["world_size"].notna()]


def _lines(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each line, small sizes first, with its series."""
    groups = rows.groupby(["series", placement(rows)], sort=False)
    return [(str(line["series"].iloc[0]), line) for _, line in groups]


def _suffix(kind: str, kinds: list[str]) -> str:
    return f", {kind} scaling" if len(kinds) > 1 else ""


def _ideal_rates(total: Axes, single: Axes, line: pd.DataFrame) -> None:
    """What the smallest size of a line would give on more ranks that lose nothing."""
    if len(line) < 2:
        return
    first, last = float(line["world_size"].iloc[0]), float(line["world_size"].iloc[-1])
    rate = float(line["images_per_s_per_rank"].iloc[0])
    x = np.geomspace(first, last, 65)
    ideal_line(total, x, rate * x)
    ideal_line(single, x, np.full_like(x, rate))
