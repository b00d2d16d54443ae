"""Parts of the figures over sizes: lines with their spread, marks, the legend, the file."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import GREY, Look, legend_below
from jobkit.analysis.scaling.sizes import Size

IDEAL = "ideal, from the smallest size"
_MARK_STEP = 0.055  # of the height of the axes: room for one mark of a run that is not ok


def lines(found: list[Size]) -> list[list[Size]]:
    """The sizes of each line: a series; where a size lies on nodes in two ways, each of them."""
    lines: dict[tuple[str, int | None], list[Size]] = {}
    for size in found:
        twins = Counter(s.world_size for s in found if s.series == size.series)
        nodes = size.nodes if max(twins.values()) > 1 else None
        lines.setdefault((size.series, nodes), []).append(size)
    return list(lines.values())


def plot_line(axes: Axes, x: ArrayLike, y: ArrayLike, look: Look, **others: Any) -> None:
    """A line as its series is told by it; others: what differs, as matplotlib calls it."""
    own = {"color": look.colour, "marker": look.marker, "ms": look.size, "ls": look.dashes}
    own |= {"lw": look.width, "zorder": look.layer}
    axes.plot(np.asarray(x), np.asarray(y), **(own | others))


def draw_line(
    axes: Axes, line: list[Size], look: Look, values: Callable[[Size], tuple[float, ...]]
) -> None:
    """The medians as a line, the range of the repeats as a band, each repeat as a dim point."""
    points = [(s.world_size or 0, sorted(values(s))) for s in line if values(s)]
    if not points:
        return
    x = [n for n, _ in points]
    middle = [median(v) for _, v in points]
    plot_line(axes, x, middle, look)
    if any(len(v) > 1 for _, v in points):
        low, high = [v[0] for _, v in points], [v[-1] for _, v in points]
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0, zorder=1)
        axes.vlines(x, low, high, color=look.colour, lw=1.2, zorder=2)
        repeats = [len(v) for _, v in points]
        every_x, every_y = np.repeat(x, repeats), [y for _, v in points for y in v]
        axes.scatter(every_x, every_y, s=12, color=look.colour, alpha=0.45, lw=0, zorder=2)
    if len({s.nodes for s in line}) == 1 and (line[0].nodes or 1) > 1:
        axes.annotate(
            f"{line[0].nodes} nodes", (x[-1], middle[-1]), (6, 6), textcoords="offset points"
        )


def mark_not_ok(axes: Axes, own: Iterable[Size], look: dict[str, Look]) -> None:
    """A cross at the foot of the axes for each size with runs that are not ok, and their status."""
    marks = [s for s in own if s.not_ok]
    stacked: Counter[int] = Counter()
    last = max((s.world_size or 0 for s in own), default=0)
    for size in marks:
        n = size.world_size or 0
        y = 0.04 + _MARK_STEP * stacked[n]
        stacked[n] += 1
        place = axes.get_xaxis_transform()
        axes.plot(
            n, y, "x", color=look[size.series].colour, ms=7, mew=2.2, transform=place, zorder=4
        )
        counts = Counter(size.not_ok)
        text = ", ".join(s if c == 1 else f"{c} {s}" for s, c in sorted(counts.items()))
        left = n == last
        axes.annotate(
            f"{size.series}: {text}",
            (n, y),
            (-8 if left else 8, 0),
            xycoords=place,
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
            color="#333333",
        )
    if marks:
        _make_room(axes, (max(stacked.values()) + 1) * _MARK_STEP)


def _make_room(axes: Axes, share: float) -> None:
    """Lower the foot of a log axis, so that marks take that share of the height for themselves."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low * (low / high) ** (share / (1 - share)), high)


def ideal_line(axes: Axes, x: ArrayLike, y: ArrayLike) -> None:
    """The thin grey line of no loss."""
    axes.plot(np.asarray(x), np.asarray(y), color=GREY, lw=0.9, zorder=1.5, label=IDEAL)


def fastest(results: Results, names: Iterable[str], most: int) -> tuple[list[str], str]:
    """As many series as an eye can follow, those with the highest rates; a note where some go."""
    found = list(dict.fromkeys(names))
    if len(found) <= most:
        return found, ""
    rates = results.scaling.groupby("series")["images_per_s"].max().fillna(0)
    kept = sorted(found, key=lambda name: -float(rates.get(name, 0)))[:most]
    return [name for name in found if name in kept], f", the {most} fastest of {len(found)} series"


def on_gpu(results: Results) -> bool:
    return bool((results.runs["device_type"] == "cuda").any())


def unit(results: Results) -> str:
    return "GPUs" if on_gpu(results) else "processes (ranks)"


def legend(
    figure: Figure, axes: list[Axes], look: dict[str, Look], extra: Sequence[Artist] = ()
) -> None:
    """One legend under the panels: the series, then what a thin line, a cross and others are."""
    handles: list[Artist] = [
        Line2D([], [], color=one.colour, marker=one.marker, ms=7, ls=one.dashes, label=name)
        for name, one in look.items()
    ]
    if any(line.get_label() == IDEAL for a in axes for line in a.lines):
        handles.append(Line2D([], [], color=GREY, lw=0.9, label=IDEAL))
    if any(line.get_marker() == "x" for a in axes for line in a.lines):
        cross = Line2D([], [], color=GREY, marker="x", ms=7, mew=2.2, ls="", label="run not ok")
        handles.append(cross)
    handles += extra
    legend_below(figure, handles)


def save(figure: Figure, path: Path) -> None:
    """Write a figure beside its place and rename it; the same figure gives the same bytes."""
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    metadata = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
    try:
        figure.savefig(beside, metadata=metadata)
        figure.set_layout_engine("none")  # it stands now; for the next file it need not be found
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
