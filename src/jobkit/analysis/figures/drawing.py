"""Parts of the figures over sizes: lines with their spread, marks, the legend, the file."""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import GREY, Look, legend_below
from jobkit.analysis.scaling.sizes import Size

IDEAL = "ideal scaling from the smallest size"
_SCALINGS = ("strong", "weak")
_MARK_STEP = 0.055  # of the height of the axes: room for the mark of one size


class Kind(NamedTuple):
    """What the sizes of one panel share: no axis has two units, or strong and weak scaling."""

    scaling: str  # strong or weak; empty: nobody said which
    unit: str  # of the rate

    def suffix(self, kinds: Sequence["Kind"]) -> str:
        """What the label of an axis adds where there are several panels."""
        if len({k.scaling for k in kinds}) < 2:
            return ""
        return f", {self.scaling} scaling" if self.scaling else ", scaling not stated"


def kind_of(size: Size) -> Kind:
    """The panel of a size."""
    return Kind(size.scaling or "", size.throughput_unit)


def kinds_of(sizes: Iterable[Size]) -> list[Kind]:
    """The panels of sizes: strong scaling first."""
    return sorted({kind_of(s) for s in sizes}, key=lambda k: (_place(k.scaling), k.unit))


def _place(scaling: str) -> int:
    return _SCALINGS.index(scaling) if scaling in _SCALINGS else len(_SCALINGS)


def known(sizes: Iterable[Size], value: str, kind: Kind) -> list[Size]:
    """The sizes of a panel that have a value, by its column's name."""
    return [
        s for s in sizes if kind_of(s) == kind and s.world_size and getattr(s, value) is not None
    ]


def panels(sizes: Sequence[Size], value: str) -> list[Kind]:
    """The panels in which two world sizes or more have a value: enough for a line."""
    found = kinds_of(sizes)
    return [k for k in found if len({s.world_size for s in known(sizes, value, k)}) > 1]


def lines(found: Sequence[Size]) -> list[list[Size]]:
    """The sizes of each line: a series; where a world size has several node counts, one for each.

    The first line has the fewest nodes at every world size, each of the others one node count.
    """
    fewest: dict[tuple[str, int | None], Size] = {}
    made: dict[tuple[str, int], list[Size]] = {}
    for size in found:  # few nodes come first
        first = fewest.setdefault((size.series, size.world_size), size) is size
        made.setdefault((size.series, 0 if first else size.nodes or 1), []).append(size)
    return list(made.values())


def interval_line(axes: Axes, line: Sequence[Size], value: str, look: Look) -> None:
    """Draw a value of a line of sizes, by its column's name, with a bar for each interval."""
    plot_line(axes, [s.devices or 0 for s in line], [getattr(s, value) for s in line], look)
    _label_nodes(axes, line, getattr(line[-1], value))
    ends = [(s.devices or 0, *interval_of(s, value)) for s in line]
    bars = [(n, low, high) for n, low, high in ends if low is not None and high is not None]
    if not bars:
        return
    at, low, high = zip(*bars, strict=True)
    axes.vlines(at, low, high, color=look.colour, lw=1.6, zorder=2)
    for end in (low, high):
        axes.plot(at, end, "_", color=look.colour, ms=9, mew=1.6, zorder=2, label="interval")


def interval_of(size: Size, value: str) -> tuple[float | None, float | None]:
    """The ends of the interval of a value, by its column's name."""
    if value == "throughput_per_rank":
        low, high = size.throughput_low, size.throughput_high
        each = size.devices or 1
        return (None, None) if low is None or high is None else (low / each, high / each)
    return getattr(size, f"{value}_low"), getattr(size, f"{value}_high")


def interval_handles(sizes: Iterable[Size], value: str) -> list[Artist]:
    """The legend's entry for the bars, where a size beyond its baseline has an interval."""
    beyond = (s for s in sizes if (s.world_size or 0) > (s.base_world_size or math.inf))
    if all(interval_of(s, value)[0] is None for s in beyond):
        return []
    return [
        Line2D([], [], color=GREY, marker="|", ms=11, ls="", label="95 % interval between runs")
    ]


def plot_line(axes: Axes, x: ArrayLike, y: ArrayLike, look: Look, **others: Any) -> None:
    """Draw a line in the look of its series; others: what differs, as matplotlib calls it."""
    own = {"color": look.colour, "marker": look.marker, "ms": look.size, "ls": look.dashes}
    own |= {"lw": look.width, "zorder": look.layer}
    axes.plot(np.asarray(x), np.asarray(y), **(own | others))


def draw_line(
    axes: Axes, line: list[Size], look: Look, values: Callable[[Size], tuple[float, ...]]
) -> None:
    """Draw medians as a line, the range of the repeats as a band, each repeat as a dim point."""
    points = [(s.devices or 0, sorted(values(s))) for s in line if values(s)]
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
    _label_nodes(axes, [s for s in line if values(s)], middle[-1])


def _label_nodes(axes: Axes, line: Sequence[Size], y: float) -> None:
    """Say at the end of a line on how many nodes its sizes are, where these are as many."""
    if len({s.nodes for s in line}) == 1 and (line[0].nodes or 1) > 1:
        place = line[-1].devices or 0, y
        axes.annotate(f"{line[0].nodes} nodes", place, (6, 6), textcoords="offset points")


def mark_not_ok(axes: Axes, own: Iterable[Size], look: dict[str, Look]) -> None:
    """Mark each size with runs that are not ok: a cross at the lower edge and their status."""
    marks = [s for s in own if s.not_ok]
    stacked: Counter[int] = Counter()
    last = max((s.devices or 0 for s in own), default=0)
    for size in marks:
        n = size.devices or 0
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
    """Extend a log axis downwards, so that marks have that share of the height."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low * (low / high) ** (share / (1 - share)), high)


def ideal_line(axes: Axes, x: ArrayLike, y: ArrayLike) -> None:
    """Draw ideal scaling as a thin grey line."""
    axes.plot(np.asarray(x), np.asarray(y), color=GREY, lw=0.9, zorder=1.5, label=IDEAL)


def fastest(results: Results, names: Iterable[str], most: int) -> tuple[list[str], str]:
    """The series with the highest rates, `most` at the most, and a note where some are left out."""
    found = list(dict.fromkeys(names))
    if len(found) <= most:
        return found, ""
    rates = results.scaling.groupby("series")["throughput"].max().fillna(0)
    kept = sorted(found, key=lambda name: -float(rates.get(name, 0)))[:most]
    return [name for name in found if name in kept], f", the {most} fastest of {len(found)} series"


def on_gpu(results: Results) -> bool:
    return bool((results.runs["device_type"] == "cuda").any())


def unit(results: Results) -> str:
    return "GPUs" if on_gpu(results) else "processes (ranks)"


def legend(
    figure: Figure, axes: list[Axes], look: dict[str, Look], extra: Sequence[Artist] = ()
) -> None:
    """Add one legend under the panels: the series, then the ideal line, the cross and others."""
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


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure's files, each whole; the same figure gives the same bytes."""
    # Laid out once. With a layout engine of its own, a figure is drawn twice for each file.
    ConstrainedLayoutEngine().execute(figure)
    for path in paths:
        # Of a name that nobody can put a link at beforehand.
        beside = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
        metadata = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        try:
            figure.savefig(beside, metadata=metadata)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
