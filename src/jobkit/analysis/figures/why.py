"""The figure of a step's time by cause: over the sizes, and over ranks where one is late."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.findings.causes import SizeBreakdown, size_breakdowns

_MAX_SERIES = 3  # side by side
_MIN_LABEL = 0.07  # of a step: a smaller part has no room for its number
# The words, the colour, and the colour of the number in it.
_PARTS = (
    ("compute", "#0072B2", "white"),
    ("exposed communication", "#D55E00", "white"),
    ("waiting for later ranks", "#009E73", "white"),
    ("data wait", "#F0C05A", "black"),
    ("host: Python, launches", "#C9CDD2", "black"),
    ("waiting for the last rank's end", "#7F6A93", "white"),
)
_COLUMNS = ("compute", "communication", "waiting", "data_wait", "host", "last_rank_wait")
Bar = Sequence[float]  # seconds of each part


def why_figure(results: Results) -> Figure | None:
    """Seconds of a step by cause; below as shares, or of each rank where one is late."""
    found = size_breakdowns(results)
    if not found:
        return None
    names, note = style.fastest(results, (one.size.series for one in found), _MAX_SERIES)
    title = f"{results.name}: time of a step by cause{note}"
    figure, axes = style.new_figure(len(names), title, style.subtitle(results, "median"), rows=2)
    shown = [one for one in found if one.size.series in names]
    milli = max(one.step.times.iteration_s for one in shown) < 1
    factor, word = (1000, "milliseconds") if milli else (1, "seconds")
    for column, name in enumerate(names):
        own = [one for one in shown if one.size.series == name]
        above, below = axes[column], axes[len(names) + column]
        rows = [_row(results, one) for one in own]
        bars = [_bar(row) for row in rows]
        _draw(above, bars, factor, _labels(own), "{:.3g}")
        late = [(row, one) for row, one in zip(rows, own, strict=True) if _by_rank(row)]
        above.set_xlabel(style.series_label(style.unit(results), name))
        if late:
            row, one = late[-1]
            _draw_ranks(below, row, factor)
            below.set_xlabel(f"rank of {one.size.world_size}; late: {row['breakdown_late_host']}")
            below.set_ylabel(f"{word} of a step")
        else:
            _draw(below, [[x / sum(bar) for x in bar] for bar in bars], 1, _labels(own), "")
            below.set_ylim(0, 1)
            below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            if column == 0:
                below.set_ylabel("share of a step")
        if column == 0:
            above.set_ylabel(f"{word} of a step")
    highest = max(panel.get_ylim()[1] for panel in axes[: len(names)])
    for panel in axes[: len(names)]:
        panel.set_ylim(0, highest)
    style.legend_below(figure, [Patch(color=colour, label=text) for text, colour, _ in _PARTS])
    return figure


def _row(results: Results, one: SizeBreakdown) -> Mapping[str, Any]:
    """The row of the run that stands for a size."""
    rows = [results.rows[run] for run in one.size.ok_runs]
    return next(r for r in rows if r["breakdown_iteration_s"] == one.step.times.iteration_s)


def _bar(row: Mapping[str, Any]) -> Bar:
    seconds = [float(row[f"breakdown_{name}_s"]) for name in _COLUMNS]
    seconds[1] -= seconds[2]  # waiting is in it
    return [max(0.0, x) for x in seconds]


def _by_rank(row: Mapping[str, Any]) -> dict[str, Bar]:
    """Each rank's seconds; empty where none is late."""
    text = row.get("breakdown_by_rank")
    return {} if text is None or pd.isna(text) else json.loads(str(text))


def _draw(
    axes: Axes, bars: Sequence[Bar], factor: float, labels: Sequence[str], total: str
) -> None:
    """Stacked bars with the numbers that fit; total: how their sums are written above them."""
    for x, bar in enumerate(bars):
        foot, height = 0.0, factor * sum(bar)
        for seconds, (_, colour, ink) in zip(bar, _PARTS, strict=False):
            part = factor * seconds
            axes.bar(x, part, 0.74, foot, color=colour, ec="white", lw=0.6)
            if part >= _MIN_LABEL * height and len(bars) <= 12:
                digits = ".0f" if part >= 10 else ".2g"
                text = f"{part:{digits}}" if total else f"{100 * part:.0f}"
                place = (x, foot + part / 2)
                axes.annotate(text, place, ha="center", va="center", color=ink, fontsize=8)
            foot += part
        if total:
            axes.annotate(
                total.format(foot), (x, foot), (0, 2), textcoords="offset points", ha="center",
                fontsize=8,
            )  # fmt: skip
    axes.margins(y=0.1)  # room for the sums
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(bars)), list(labels))
    axes.set_xlim(-0.6, len(bars) - 0.4)


def _draw_ranks(axes: Axes, row: Mapping[str, Any], factor: float) -> None:
    """The ranks side by side, the late one in bold."""
    ranks, late = _by_rank(row), row["breakdown_late_rank"]
    name = None if pd.isna(late) else f"{late:.0f}"  # none: a whole node is late
    labels = [f"{rank} (late)" if rank == name else rank for rank in ranks]
    _draw(axes, list(ranks.values()), factor, labels, "{:.3g}")
    for label in axes.get_xticklabels():
        label.set_fontweight("bold" if label.get_text().endswith("(late)") else "normal")


def _labels(own: Sequence[SizeBreakdown]) -> list[str]:
    """World sizes; one with several node counts as NODESxRANKS."""
    ranks = [one.size.world_size for one in own]
    return [
        f"{n}" if ranks.count(n) == 1 else f"{one.size.nodes}x{one.size.ranks_per_node}"
        for n, one in zip(ranks, own, strict=True)
    ]
