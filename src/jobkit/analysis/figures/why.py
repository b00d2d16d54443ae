"""The figure of a step's time by cause: over the sizes, and over ranks where one is late."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.findings.causes import size_breakdowns

_MAX_SERIES = 3  # side by side
_MAX_LABELLED = 12  # bars with numbers
_MIN_LABEL = 0.07  # of the highest bar: a smaller part has no room for its number
# The column of its seconds, the words, the colour, and the colour of the number in it.
_PARTS = (
    ("compute", "compute", "#0072B2", "white"),
    ("communication", "exposed communication", "#D55E00", "white"),
    ("waiting", "waiting for later ranks", "#009E73", "white"),
    ("data_wait", "data wait", "#F0C05A", "black"),
    ("host", "host: Python, launches", "#C9CDD2", "black"),
    ("last_rank_wait", "waiting for the last rank's end", "#7F6A93", "white"),
)
Bar = Sequence[float]  # seconds of each part


def why_figure(results: Results) -> Figure | None:
    """Seconds of a step by cause; below as shares, or of each rank where one is late."""
    found = size_breakdowns(results)
    if not found:
        return None
    names, note = style.fastest(results, (one.size.series for one in found), _MAX_SERIES)
    title = f"{results.name}: time of a step by cause{note}"
    figure, axes = style.new_figure(len(names), title, style.subtitle(results), rows=2)
    milli = max(one.row["breakdown_iteration_s"] for one in found if one.size.series in names) < 1
    factor, word = (1000, "milliseconds") if milli else (1, "seconds")
    for column, name in enumerate(names):
        own = [one for one in found if one.size.series == name]
        above, below = axes[column], axes[len(names) + column]
        ranks = [one.size.world_size for one in own]
        labels = [
            f"{n}" if ranks.count(n) == 1 else f"{one.size.nodes}x{one.size.ranks_per_node}"
            for n, one in zip(ranks, own, strict=True)
        ]
        bars = []
        for one in own:
            seconds = [float(one.row[f"breakdown_{part[0]}_s"]) for part in _PARTS]
            seconds[1] -= seconds[2]  # waiting is in it
            bars.append([max(0.0, x) for x in seconds])
        _draw_bars(above, bars, factor, labels)
        above.set_xlabel(f"{style.unit(results)}\n{textwrap.fill(name, 36)}")
        late = [one for one in own if one.row.get("breakdown_by_rank")]
        if late:
            size, row = late[-1].size, late[-1].row
            of_ranks: dict[str, Bar] = json.loads(row["breakdown_by_rank"])
            _draw_bars(below, [*of_ranks.values()], factor, [*of_ranks])
            last = row.get("breakdown_late_rank")  # none: a whole node is late
            who = "" if last is None else f"rank {last} on "
            late_text = f"late: {who}{row['breakdown_late_host']}"
            below.set_xlabel(f"rank of {size.world_size}; {late_text}")
            below.set_ylabel(f"{word} of a step")
        else:
            _draw_bars(below, [[x / sum(bar) for x in bar] for bar in bars], None, labels)
    axes[0].set_ylabel(f"{word} of a step")
    highest = max(panel.get_ylim()[1] for panel in axes[: len(names)])
    for panel in axes[: len(names)]:
        panel.set_ylim(0, highest)
    style.legend(figure, axes)
    return figure


def _draw_bars(
    axes: Axes, bars: Sequence[Bar], factor: float | None, labels: Sequence[str]
) -> None:
    """Stacked bars with the numbers that fit and their sums above; factor: None for shares."""
    parts = np.asarray(bars, dtype=float).T * (factor or 100)
    feet, totals = np.cumsum(parts, axis=0) - parts, parts.sum(axis=0)
    few = len(bars) <= _MAX_LABELLED
    for seconds, foot, (_, text, colour, ink) in zip(parts, feet, _PARTS, strict=False):
        bar: Any = {"color": colour, "ec": "white", "lw": 0.6, "label": text}
        drawn = axes.bar(range(len(bars)), seconds, 0.74, foot, **bar)
        numbers = [f"{v:.0f}" if v >= 10 or not factor else f"{v:.2g}" for v in seconds]
        fits = (seconds >= _MIN_LABEL * totals.max()) & few
        shown = [number if fit else "" for number, fit in zip(numbers, fits, strict=True)]
        axes.bar_label(drawn, shown, label_type="center", color=ink, fontsize=8)
    if factor:
        sums = [f"{total:.3g}" * few for total in totals]
        axes.bar_label(drawn, sums, padding=2, fontsize=8)
        axes.set_ylim(0, 1.1 * totals.max())  # room for the sums
    else:
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_ylabel("share of a step")
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(bars)), list(labels), fontsize=10 if few else 7)
    axes.set_xlim(-0.6, len(bars) - 0.4)
