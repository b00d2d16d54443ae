"""The figures of a value over sizes: a table of what each shows, and one function that draws it.

A panel has one unit and one kind of scaling. Medians are lines; of the repeats there is the
interval between runs or, without one, their range and each value as a dim point.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted

_MARK_STEP = 0.055  # of the height of the axes: room for the mark of one size
_MAX_NAMED = 6  # runs that are not ok, with their series beside the cross
_PERCENTILES = {
    "step_p50_s": "median",
    "step_p95_s": "95th percentile",
    "step_p99_s": "99th percentile",
}
Ideal = Callable[[NDArray[Any]], NDArray[Any]]  # of size / smallest size


def _same(ratio: NDArray[Any]) -> NDArray[Any]:
    return np.ones_like(ratio)


@dataclass(frozen=True, eq=False)
class Panel:
    """A value over sizes, by the name of a field of Size or of a column of results.csv."""

    label: str
    names: Mapping[str, str]  # several are told apart by their dashes
    scale: str = "zero"  # zero (linear, from 0), near (linear), log, time, ratio or share
    ideal: Ideal | None = None
    interval: bool = False  # between runs, by Size's fields NAME_low and NAME_high


@dataclass(frozen=True)
class Panels:
    """A figure: its title and panels."""

    title: str
    panels: tuple[Panel, ...]
    min_sizes: int = 1  # world sizes with a value, else there is nothing to compare


_OF_TIME = Panel("time per {of}{ranks} (s)", {"times_s": ""}, "time", np.reciprocal)
_RATE = Panel("{rate}", {"throughput": ""}, "log", np.positive, True)
_RATE_OF_ONE = Panel("{rate} per {process}", {"throughput_per_rank": ""}, "zero", _same, True)
_SPEED_UP = Panel("speed-up\nrelative to {base}", {"speed_up": ""}, "ratio", np.positive, True)
_EFFICIENCY = Panel(
    "parallel efficiency\nrelative to {base}", {"efficiency": ""}, "share", _same, True
)
_TO_ACCURACY = Panel(
    "time to {target} accuracy (s)", {"time_to_accuracy_s": ""}, "time", np.reciprocal
)
_LOSS = Panel("final validation loss", {"val_loss": ""}, "near")
_ACCURACY = Panel("final validation accuracy", {"val_accuracy": ""}, "near share")
_MEMORY = Panel("peak memory per {process}, {kind} ({mib})", {"peak_memory_mib": ""})
_STEPS = Panel("time of a step (s)", _PERCENTILES, "time")
_ENERGY = Panel("energy per {work} (J), of: {joules_of}", {"joules_per_work": ""})
BY_SIZE = {
    "time_per_epoch": Panels("time per {of}", (_OF_TIME,)),
    "throughput": Panels("throughput", (_RATE, _RATE_OF_ONE), 2),
    "speed_up": Panels("speed-up", (_SPEED_UP,), 2),
    "efficiency": Panels("parallel efficiency", (_EFFICIENCY,), 2),
    "time_to_accuracy": Panels("training time to {target} accuracy", (_TO_ACCURACY,), 2),
    "loss_and_accuracy_by_size": Panels("loss and accuracy at each size", (_LOSS, _ACCURACY), 2),
    "peak_memory": Panels("peak memory per {process}", (_MEMORY,)),
    "step_times": Panels("time of a step", (_STEPS,)),
    "energy": Panels("energy per {work}", (_ENERGY,)),
}


class Kind(NamedTuple):
    """What the sizes of one panel share: no axis has two units, or strong and weak scaling."""

    scaling: str  # strong or weak; empty: nobody said which
    unit: str  # of the rate


def kind_of(size: Size) -> Kind:
    """The panel of a size."""
    return Kind(size.scaling or "", size.throughput_unit)


def kinds_of(sizes: Iterable[Size]) -> list[Kind]:
    """The panels of sizes: strong scaling first, then weak."""
    return sorted({kind_of(s) for s in sizes}, key=lambda k: (k.scaling or "z", k.unit))


def size_figure(results: Results, name: str) -> Figure | None:
    """A figure of BY_SIZE; None where too few sizes have a value."""
    figure_of = BY_SIZE[name]
    sizes = [s for s in results.sizes if s.world_size]
    columns = {n: _column(results, n) for p in figure_of.panels for n in p.names}
    known = {
        (kind, panel): {
            value: {s: v for s in sizes if kind_of(s) == kind and (v := _values(s, value, columns))}
            for value in panel.names
        }
        for kind in kinds_of(sizes)
        for panel in figure_of.panels
    }
    shown = [
        key
        for key, lines in known.items()
        if all(len({s.world_size for s in line}) >= figure_of.min_sizes for line in lines.values())
    ]
    kinds = list(dict.fromkeys(kind for kind, _ in shown))
    if not shown or (name == "energy" and len({s.joules_of for s in sizes if s.joules_of}) > 1):
        return None
    words = _words(results, [s for s in sizes if kind_of(s) in kinds])
    rows = len(kinds) if 1 < len(kinds) < len(shown) else 1
    first_panel = figure_of.panels[0]
    is_median = first_panel.interval or name == "step_times"
    below = style.subtitle(results, "median" if is_median else "median and range")
    title = f"{results.name}: {figure_of.title.format(**words)}"
    figure, axes = style.new_figure(len(shown) // rows, title, below, rows=rows)
    look = style.looks(s.series for s in sizes)
    for panel_axes, (kind, panel) in zip(axes, shown, strict=True):
        of_kind = [s for s in sizes if kind_of(s) == kind]
        _draw_panel(panel_axes, panel, known[kind, panel], of_kind, look)
        _scale(panel_axes, panel.scale)
        if not panel.interval:
            mark_not_ok(panel_axes, of_kind, look)
        style.size_axis(panel_axes, [s.devices or 0 for s in of_kind], style.unit(results))
        weak = " x ranks" if kind.scaling == "weak" else ""
        label = panel.label.format(**words | {"rate": kind.unit, "ranks": weak})
        panel_axes.set_ylabel(label + suffix(kind, kinds))
    drawn = {s.series for key in shown for lines in known[key].values() for s in lines}
    drawn |= {s.series for s in sizes if s.not_ok and not first_panel.interval}
    extra = _extra(first_panel, [s for key in shown for s in next(iter(known[key].values()))])
    style.legend(figure, axes, {k: v for k, v in look.items() if k in drawn}, extra)
    return figure


def suffix(kind: Kind, kinds: Sequence[Kind]) -> str:
    """What the label of an axis adds where there are several kinds of scaling."""
    if len({k.scaling for k in kinds}) < 2:
        return ""
    return f", {kind.scaling} scaling" if kind.scaling else ", scaling not stated"


def _column(results: Results, name: str) -> dict[str, float]:
    """A column of results.csv by run_id; empty for a field of Size alone."""
    if name not in results.runs:
        return {}
    column = results.runs.set_index("run_id")[name].dropna()
    return {str(run_id): float(v) for run_id, v in column.items()}


def _values(size: Size, name: str, columns: Mapping[str, Mapping[str, float]]) -> tuple[float, ...]:
    """The values of a size: a field of it, or the column of its runs that are ok."""
    if name == "times_s":  # of weak scaling the time for the work of the smallest size
        weak = size.scaling == "weak" and size.base_world_size and size.world_size
        share = (size.world_size or 1) / (size.base_world_size or 1) if weak else 1
        return tuple(t * share for t in size.times_s)
    if columns[name] and name not in ("throughput", "joules_per_work"):
        values = tuple(columns[name][r] for r in size.ok_runs if r in columns[name])
        return values if name not in _PERCENTILES or min(values, default=0) > 0 else ()
    value = getattr(size, name, None)
    return () if value is None else (value,)


def _words(results: Results, sizes: Sequence[Size]) -> dict[str, str]:
    """What titles and labels name."""
    gpus = style.on_gpu(results)
    of, bases = {s.time_of for s in sizes}, {s.base_world_size for s in sizes if s.base_world_size}
    peaks = [m for s in sizes for m in s.peaks_memory_mib]
    base = counted(max(bases, default=1), "rank")
    of_series, series = {s.base_series for s in sizes if s.base_series}, {s.series for s in sizes}
    if len(of_series) == 1 and len(series) > 1:  # one serial run for all
        base = f"{style.short(str(of_series.pop()))} on {base}"
    return {
        "process": "GPU" if gpus else "process",
        "kind": "allocated" if gpus else "resident",
        "mib": "GiB" if max(peaks, default=0) >= 10 * 1024 else "MiB",
        "of": of.pop() if len(of) == 1 else "amount of work",
        "base": base if len(bases) == 1 else "the smallest size",
        "target": f"{sizes[0].target_accuracy or 0:.0%}",
        "work": sizes[0].throughput_unit.partition("/")[0].removesuffix("s"),
        "joules_of": next((s.joules_of for s in sizes if s.joules_of), ""),
    }


def lines_of(sizes: Iterable[Size]) -> list[list[Size]]:
    """The sizes of each line: a series; where a world size has several node counts, one for each.

    The first line has the fewest nodes at every world size, each of the others one node count.
    """
    fewest: dict[tuple[str, int | None], Size] = {}
    lines: dict[tuple[str, int], list[Size]] = {}
    for size in sizes:  # few nodes come first
        first = fewest.setdefault((size.series, size.world_size), size) is size
        lines.setdefault((size.series, 0 if first else size.nodes or 1), []).append(size)
    return list(lines.values())


def _draw_panel(
    axes: Axes,
    panel: Panel,
    known: Mapping[str, Mapping[Size, tuple[float, ...]]],
    sizes: Sequence[Size],
    look: Mapping[str, style.Look],
) -> None:
    """Draw a line for each series and value; sizes: all, also those without a value."""
    if panel.scale in ("log", "time"):
        axes.set_yscale("log")
    peaks = [v for values in known.get("peak_memory_mib", {}).values() for v in values]
    factor = 1 / 1024 if max(peaks, default=0) >= 10 * 1024 else 1.0
    for dashes, (name, values) in zip(style.DASHES, known.items(), strict=False):
        for line in lines_of(values):
            series, first = line[0].series, line[0].devices or 1
            points = {s: tuple(factor * v for v in values[s]) for s in line}
            options = {"ls": dashes} if len(known) > 1 else {}
            draw_line(axes, points, look[series], name if panel.interval else "", **options)
            if panel.ideal is None or len(line) < 2:
                continue
            # From the smallest size to the largest that was planned. On a linear axis the ideal is
            # a curve. Of what is relative to a base it is known, also where that is another series.
            last = max(s.devices or 0 for s in sizes if s.series == series)
            x = np.geomspace(first, last, 65)
            weak_time = panel.ideal is np.reciprocal and line[0].scaling == "weak"
            relative = {"speed_up": first / (line[0].base_world_size or 1), "efficiency": 1.0}
            start = relative.get(name, median(points[line[0]]))
            style.ideal_line(axes, x, start * (_same if weak_time else panel.ideal)(x / first))


def draw_line(
    axes: Axes,
    points: Mapping[Size, tuple[float, ...]],
    look: style.Look,
    interval: str,
    **options: Any,
) -> None:
    """Draw medians as a line, with a bar for each interval, or the range of the repeats.

    interval: the name of the value; empty: the range of the repeats and each of them.
    """
    x = [s.devices or 0 for s in points]
    middle = [median(values) for values in points.values()]
    style.plot_line(axes, x, middle, look, **options)
    nodes = {s.nodes for s in points}
    if len(nodes) == 1 and (last := next(iter(nodes)) or 1) > 1:
        axes.annotate(f"{last} nodes", (x[-1], middle[-1]), (6, 6), textcoords="offset points")
    if interval:
        bars = [(n, ends_of(s, interval)) for n, s in zip(x, points, strict=True)]
        for at, ends in bars:
            bar: Any = {"color": look.colour, "zorder": 2, "label": "interval"}
            axes.plot([at, at], ends or (np.nan, np.nan), "_-", lw=1.6, ms=9, mew=1.6, **bar)
    elif not options and any(len(values) > 1 for values in points.values()):
        lows, highs = [min(v) for v in points.values()], [max(v) for v in points.values()]
        axes.fill_between(x, lows, highs, color=look.colour, alpha=0.15, lw=0, zorder=1)
        axes.vlines(x, lows, highs, color=look.colour, lw=1.2, zorder=2)
        every_x = np.repeat(x, [len(values) for values in points.values()])
        every_y = [v for values in points.values() for v in values]
        axes.scatter(every_x, every_y, s=12, color=look.colour, alpha=0.45, lw=0, zorder=2)


def ends_of(size: Size, name: str) -> tuple[float, float] | None:
    """The ends of the interval of a value; None without one."""
    of, share = (name, 1) if name != "throughput_per_rank" else ("throughput", size.devices or 1)
    low, high = getattr(size, f"{of}_low"), getattr(size, f"{of}_high")
    return None if low is None or high is None else (low / share, high / share)


def _scale(axes: Axes, scale: str) -> None:
    """The vertical axis of a panel."""
    if scale == "ratio":
        style.log_ratio_axis(axes)
    elif scale == "time":
        style.log_time_axis(axes)
    elif scale == "log":
        style.log_axis(axes.yaxis)
    elif scale.startswith("near"):
        # The axis spans a tenth of its values at least, so that a small difference looks small.
        low, high = axes.get_ylim()
        margin = max(0.0, 0.1 * abs(high) - (high - low)) / 2
        share = scale.endswith("share")
        axes.set_ylim(max(0.0, low - margin), min(1.0, high + margin) if share else high + margin)
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            for line in axes.lines:  # a marker at 100 % is drawn whole
                line.set_clip_on(False)
    else:
        top = axes.get_ylim()[1]
        axes.set_ylim(0, max(1.1, top) if scale == "share" else 1.1 * top)
        percent = PercentFormatter(1.0, decimals=0)
        axes.yaxis.set_major_formatter(percent if scale == "share" else style.PLAIN)


def mark_not_ok(axes: Axes, sizes: Sequence[Size], look: Mapping[str, style.Look]) -> None:
    """Mark each size with runs that are not ok: a cross at the lower edge and their status."""
    marks = [s for s in sizes if s.not_ok]
    stacked: Counter[int] = Counter()
    last = max((s.devices or 0 for s in sizes), default=0)
    place = axes.get_xaxis_transform()
    for size in marks:
        n = size.devices or 0
        y = 0.04 + _MARK_STEP * stacked[n]
        stacked[n] += 1
        colour = look[size.series].colour
        axes.plot(n, y, "x", color=colour, ms=7, mew=2.2, transform=place, zorder=4)
        if len(marks) > _MAX_NAMED:
            continue
        counts = sorted(Counter(size.not_ok).items())
        text = ", ".join(s if c == 1 else f"{c} {s}" for s, c in counts)
        beside: Any = {"ha": "right", "xytext": (-8, 0)} if n == last else {"xytext": (8, 0)}
        beside |= {"xycoords": place, "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{style.short(size.series)}: {text}", (n, y), color="#333333", **beside)
    low, high = axes.get_ylim()
    if marks and axes.get_yscale() == "log":  # no mark hides a point
        room = (max(stacked.values()) + 1) * _MARK_STEP
        axes.set_ylim(low * (low / high) ** (room / (1 - room)), high)


def _extra(panel: Panel, shown: Iterable[Size]) -> list[Line2D]:
    """The legend's entries beside the series: intervals, or what the dashes mean."""
    texts = zip(panel.names.values(), style.DASHES, strict=False)
    entries = [style.entry(text, ls=dashes) for text, dashes in texts if text]
    name = next(iter(panel.names))
    beyond = (s for s in shown if (s.world_size or 0) > (s.base_world_size or 1 << 31))
    if panel.interval and any(ends_of(s, name) for s in beyond):
        entries.append(style.entry("95 % interval between runs", marker="|", ms=11, ls=""))
    return entries
