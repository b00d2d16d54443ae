"""The figure of the time of an iteration by activity: stacked bars, a panel for each series."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import (
    fastest,
    legend_below,
    new_figure,
    series_label,
    subtitle,
    unit,
)
from jobkit.analysis.findings.causes import SizeBreakdown, size_breakdowns

_MOST = 3  # series side by side
_LEAST_LABEL = 0.07  # of the iteration: a smaller part has no room for its number
# Of a Breakdown: the field, its words, its colour, the colour of the number in it.
_PARTS = (
    ("compute_s", "compute", "#0072B2", "white"),
    ("messages_s", "exposed communication", "#D55E00", "white"),
    ("slower_ranks_s", "waiting for slower ranks", "#009E73", "white"),
    ("data_wait_s", "data wait", "#F0C05A", "black"),
    ("host_s", "host: Python, launches", "#C9CDD2", "black"),
    ("last_rank_wait_s", "waiting for the last rank's end", "#7F6A93", "white"),
)


def breakdown_figure(results: Results) -> Figure | None:
    """Seconds of an iteration by activity, and below as shares, over sizes."""
    found = size_breakdowns(results)
    if not found:
        return None
    names, note = fastest(results, (one.size.series for one in found), _MOST)
    title = f"{results.name}: time of one iteration by activity{note}"
    figure, axes = new_figure(len(names), title, subtitle(results, "median"), rows=2)
    shown = [one for one in found if one.size.series in names]
    milli = max(one.step.times.iteration_s for one in shown) < 1
    for column, name in enumerate(names):
        own = [one for one in shown if one.size.series == name]
        above, below = axes[column], axes[len(names) + column]
        _stack(above, own, 1000 if milli else 1)
        _share(below, own)
        _size_ticks(above, own)
        _size_ticks(below, own)
        below.set_xlabel(series_label(unit(results), name))
        if column == 0:
            above.set_ylabel(f"{'milliseconds' if milli else 'seconds'} per iteration")
            below.set_ylabel("share of the iteration")
    highest = max(one.get_ylim()[1] for one in axes[: len(names)])
    for one in axes[: len(names)]:
        one.set_ylim(0, highest)
    handles = [Patch(color=colour, label=text) for _, text, colour, _ in _PARTS]
    legend_below(figure, handles)
    return figure


def _stack(axes: Axes, own: list[SizeBreakdown], factor: float) -> None:
    """Draw the stacked parts of each size, and their sum above."""
    foot = [0.0] * len(own)
    for field, _, colour, _ in _PARTS:
        heights = [factor * getattr(one.step.times, field) for one in own]
        axes.bar(range(len(own)), heights, 0.74, foot, color=colour, ec="white", lw=0.6)
        foot = [a + b for a, b in zip(foot, heights, strict=True)]
    for x, y in enumerate(foot):
        axes.annotate(
            f"{y:.3g}", (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8
        )
    axes.margins(y=0.1)  # room for the sums
    axes.grid(visible=False, axis="x")


def _share(axes: Axes, own: list[SizeBreakdown]) -> None:
    """Draw the parts as shares of their sum, with numbers where these fit."""
    totals = [sum(getattr(one.step.times, field) for field, *_ in _PARTS) for one in own]
    foot = [0.0] * len(own)
    for field, _, colour, ink in _PARTS:
        shares = [
            getattr(one.step.times, field) / total for one, total in zip(own, totals, strict=True)
        ]
        axes.bar(range(len(own)), shares, 0.74, foot, color=colour, ec="white", lw=0.6)
        for x, (share, y) in enumerate(zip(shares, foot, strict=True)):
            if share >= _LEAST_LABEL:
                place, text = (x, y + share / 2), f"{100 * share:.0f}"
                axes.annotate(text, place, ha="center", va="center", color=ink, fontsize=8)
        foot = [a + b for a, b in zip(foot, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(visible=False, axis="x")


def _size_ticks(axes: Axes, own: list[SizeBreakdown]) -> None:
    """Label the bars with world sizes; one with several node counts as NODESxRANKS."""
    ranks = [one.size.world_size for one in own]
    labels = [
        f"{n}" if ranks.count(n) == 1 else f"{one.size.nodes}x{one.size.ranks_per_node}"
        for n, one in zip(ranks, own, strict=True)
    ]
    axes.set_xticks(range(len(own)), labels)
    axes.set_xlim(-0.6, len(own) - 0.4)
