"""The figure of a step's time by cause: over the sizes, and over ranks where one is late."""

import json
import textwrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.findings.causes import size_breakdowns
from jobkit.analysis.scaling.sizes import fewest_nodes

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


def why_figure(results: Results) -> Figure | None:
    """Shares of a step by cause; below, where one is late, the seconds of each rank."""
    found = size_breakdowns(results)
    if not found:
        return None
    names, note = style.fastest(results, (one.size.series for one in found), _MAX_SERIES)
    title = f"time of a step by cause{note}"
    shown = [one for one in found if one.size.series in names]
    late = {one.size.series: one for one in shown if one.row.get("breakdown_by_rank")}
    figure, axes = style.new_figure(len(names), title, results, 1 + bool(late))
    milli = max(one.row["breakdown_iteration_s"] for one in shown) < 1
    factor, word = (1000, "milliseconds") if milli else (1, "seconds")
    for column, name in enumerate(names):
        line = fewest_nodes([one.size for one in shown], name)
        own = [one for one in shown if one.size in line]
        bars = []
        for one in own:
            seconds = [float(one.row[f"breakdown_{part[0]}_s"]) for part in _PARTS]
            seconds[1] -= seconds[2]  # waiting is in it
            bars.append([factor * max(0.0, x) for x in seconds])
        sums = [sum(bar) or 1.0 for bar in bars]
        # Seconds would hide what is lost at large sizes: in strong scaling their steps are short.
        shares = [[100 * x / total for x in bar] for bar, total in zip(bars, sums, strict=True)]
        _draw_bars(axes[column], shares, [str(one.size.world_size) for one in own], sums)
        axes[column].set_xlabel(f"{style.unit(results)}\n{textwrap.fill(name, 36)}")
    axes[0].set_ylabel(f"% of a step (above: its {word})")
    for panel, name in zip(axes[len(names) :], names, strict=bool(late)):
        if name not in late:
            panel.axis("off")
            continue
        size, row = late[name].size, late[name].row
        of_ranks: dict[str, list[float]] = json.loads(row["breakdown_by_rank"])
        bars = [[factor * x for x in bar] for bar in of_ranks.values()]
        _draw_bars(panel, bars, [*of_ranks], [sum(bar) for bar in bars])
        last = row.get("breakdown_late_rank")  # none: a whole node is late
        who = "" if last is None else f"rank {last} on "
        panel.set_xlabel(f"rank of {size.world_size}; late: {who}{row['breakdown_late_host']}")
        panel.set_ylabel(f"{word} of a step")
    style.legend(figure, axes)
    return figure


def _draw_bars(axes: Axes, bars: list[list[float]], labels: list[str], sums: list[float]) -> None:
    """Stacked bars with the numbers that fit, and the seconds of the whole step above."""
    parts = _PARTS[: len(bars[0])]
    table = pd.DataFrame(bars, labels, [part[1] for part in parts])
    look: Any = {"color": [part[2] for part in parts], "ec": "white", "lw": 0.6, "width": 0.74}
    table.plot.bar(stacked=True, ax=axes, rot=0, legend=False, **look)
    totals = table.sum(axis=1)
    axes.set_ylim(0, 1.1 * totals.max())  # room for the sums
    axes.grid(visible=False, axis="x")
    if len(bars) > _MAX_LABELLED:
        axes.tick_params(axis="x", labelsize=7)
        return
    drawn: Any  # a container of bars
    for drawn, (_, _, _, ink) in zip(axes.containers, parts, strict=True):
        numbers = [
            ("" if v < _MIN_LABEL * totals.max() else f"{v:.0f}" if v >= 10 else f"{v:.2g}")
            for v in drawn.datavalues
        ]
        axes.bar_label(drawn, numbers, label_type="center", color=ink, fontsize=8)
    axes.bar_label(drawn, [f"{total:.3g}" for total in sums], padding=2, fontsize=8)
