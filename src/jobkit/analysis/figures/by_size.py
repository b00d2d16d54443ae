"""The figures of a value over sizes: a table of what each shows, and one function that draws it.

A panel has one unit and one kind of scaling. Medians are lines; a bar is the interval between runs
or, of a value without one, the range of the repeats. At the end, all series at one size as bars.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted, counted_ranks
from jobkit.spec.runspec import ONE_RANK

_MAX_BARS = 12  # under each other
Values = tuple[float, ...]  # of each repeat, or one of their size


class Panel(NamedTuple):
    """A value over sizes."""

    name: str  # of a field of Size, or of OF_RUNS
    label: str
    scale: str = "zero"  # zero and share (linear, from 0), near (linear), log or ratio
    ideal: Callable[[NDArray[Any]], NDArray[Any]] | None = None  # of size / smallest size


OF_RUNS = ("val_loss", "val_accuracy")  # columns of the runs
_EFFICIENCY = "parallel efficiency\nrelative to {base}"
BY_SIZE = {
    "time_per_epoch": [Panel("times_s", "time per {of} (s)", "log", np.reciprocal)],
    "throughput": [
        Panel("throughput", "throughput ({rate})", "log", np.positive),
        Panel("throughput_per_rank", "throughput per {process} ({rate})", "zero", np.ones_like),
    ],
    "speed_up": [Panel("speed_up", "speed-up\nrelative to {base}", "ratio", np.positive)],
    "efficiency": [Panel("efficiency", _EFFICIENCY, "share", np.ones_like)],
    "time_to_accuracy": [
        Panel("time_to_accuracy_s", "time to {target} accuracy (s)", "log", np.reciprocal)
    ],
    "loss_and_accuracy_by_size": [
        Panel("val_loss", "final validation loss", "near"),
        Panel("val_accuracy", "final validation accuracy", "near"),
    ],
    "peak_memory": [Panel("peaks_memory_mib", "peak memory per {process}, {kind} (MiB)")],
}


def size_figure(results: Results, name: str, forecasts: Sequence[Forecast] = ()) -> Figure | None:
    """A figure of BY_SIZE; None where fewer than two world sizes have a value.

    forecasts: drawn in the speed-up, beyond what was measured.
    """
    # No panel has two units, or strong and weak scaling.
    kinds: dict[tuple[str, str], list[Size]] = {}
    for size in results.sizes:
        if size.world_size:
            kinds.setdefault((size.scaling or "", size.throughput_unit), []).append(size)
    known: list[tuple[Panel, tuple[str, str], dict[Size, Values]]] = []
    for kind in sorted(kinds, key=lambda kind: (kind[0] or "z", kind[1])):  # strong, then weak
        for panel in BY_SIZE[name]:
            values = {s: v for s in kinds[kind] if (v := _values(results, s, panel.name))}
            if len({s.world_size for s in values}) > 1:
                known.append((panel, kind, values))
    if not known:
        return None
    shown = list(dict.fromkeys(kind for _, kind, _ in known))
    words = _words(results, [s for kind in shown for s in kinds[kind]])
    texts = [panel.label.format(**words, rate=unit).split("\n") for panel, (_, unit), _ in known]
    labels = [text[0] for text in texts]
    titles = dict.fromkeys(label.split(" (")[0] for label in labels)
    rows = len(shown) if len(known) == 2 * len(shown) else 1  # a row for each kind
    title = f"{results.name}: {' and '.join(titles)}"
    subtitle = "\n".join([style.subtitle(results), *texts[0][1:]])
    figure, axes = style.new_figure(len(known) // rows, title, subtitle, rows)
    look = style.looks(s.series for s in results.sizes if s.world_size)
    several = len({scaling for scaling, _ in shown}) > 1
    for panel_axes, label, (panel, kind, values) in zip(axes, labels, known, strict=True):
        beyond = [f for f in forecasts if f.base in kinds[kind]]
        beyond = beyond if name == "speed_up" else []
        places = [s.devices or 0 for s in kinds[kind]] + [n for f in beyond for n in f.sizes]
        for line in lines_of(values):
            _draw_line(panel_axes, {s: values[s] for s in line}, look[line[0].series], panel.name)
            if panel.ideal and len(line) > 1:
                first, smallest = line[0], line[0].devices or 1
                # What is relative to a base has a known ideal, also where the base is another
                # series. The line ends at the largest size that was planned.
                relative = {"speed_up": smallest / (first.base_world_size or 1), "efficiency": 1.0}
                start = relative.get(panel.name, median(values[first]))
                ratio = np.geomspace(1, max(places) / smallest, 65)
                own: Any = {"color": style.GREY, "label": style.IDEAL, "zorder": 1.5}
                panel_axes.plot(smallest * ratio, start * panel.ideal(ratio), lw=0.9, **own)
        mark_not_ok(panel_axes, kinds[kind])
        _scale(panel_axes, panel)
        style.size_axis(panel_axes, places, style.unit(results))
        if beyond:
            _draw_forecasts(panel_axes, beyond, look)
        panel_axes.set_ylabel(label + f", {kind[0] or 'unstated'} scaling" * several)
    style.legend(figure, axes)
    return figure


def _draw_forecasts(
    axes: Axes, forecasts: Sequence[Forecast], look: Mapping[str, style.Look]
) -> None:
    """Draw each forecast with its interval, from the largest measured size on."""
    for forecast in forecasts:
        x = np.geomspace(forecast.prediction.sizes[-1], forecast.sizes[-1], 33)
        y, low, high = np.asarray([forecast.speed_up(n) for n in x]).T
        own: Any = {"color": look[forecast.base.series]["color"]}
        axes.plot(x, y, ls=(0, (4, 2)), lw=1.4, zorder=2.5, label=style.FORECAST, **own)
        axes.fill_between(x, low, high, alpha=0.18, lw=0, zorder=1, label=style.BAND, **own)
    last = max(f.prediction.sizes[-1] for f in forecasts)
    axes.axvspan(last, axes.get_xlim()[1], color="#F4F4F4", zorder=0)


def _values(results: Results, size: Size, name: str) -> Values:
    """The value of a size, or those of its runs that are ok."""
    if name in OF_RUNS:
        values = [results.rows[run_id].get(name) for run_id in size.ok_runs]
    else:
        value = getattr(size, name)
        values = [*value] if isinstance(value, tuple) else [value]
    return tuple(float(v) for v in values if v is not None)


def _words(results: Results, sizes: Sequence[Size]) -> dict[str, str]:
    """What titles and labels name."""
    on_gpus = style.unit(results) == "GPUs"
    of = {s.time_of for s in sizes}
    bases = {(s.base_series, s.base_world_size) for s in sizes if s.base_series}
    base = "the base of each series"
    if len(bases) == 1:
        ((series, ranks),) = bases
        base = f"{style.short(series or '')} on {counted(ranks or 0, 'rank')}"
    return {
        "process": "GPU" if on_gpus else "process",
        "kind": "allocated" if on_gpus else "resident",
        "of": of.pop() if len(of) == 1 else "amount of work",
        "base": base,
        "target": f"{sizes[0].target_accuracy or 0:.0%}",
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


def _draw_line(axes: Axes, points: Mapping[Size, Values], look: style.Look, name: str) -> None:
    """Draw medians as a line, with a bar for the interval or the range of each value's repeats."""
    x = [s.devices or 0 for s in points]
    middle = [median(values) for values in points.values()]
    axes.plot(x, middle, **look)
    nodes = {s.nodes for s in points}
    if len(nodes) == 1 and (last := next(iter(nodes)) or 1) > 1:
        axes.annotate(f"{last} nodes", (x[-1], middle[-1]), (6, 6), textcoords="offset points")
    for at, (size, values) in zip(x, points.items(), strict=True):
        ends, label = ends_of(size, name), style.INTERVAL
        if len(values) > 1:
            ends, label = (min(values), max(values)), style.RANGE
        if ends and ends[0] < ends[1]:
            bar: Any = {"color": look["color"], "zorder": 2, "label": label}
            axes.plot([at, at], ends, "_-", lw=1.6, ms=9, mew=1.6, **bar)


def ends_of(size: Size, name: str) -> tuple[float, float] | None:
    """The ends of the interval of a value; None without one."""
    if name == "throughput_per_rank" and (ends := size.interval("throughput")):
        return ends[0] / (size.devices or 1), ends[1] / (size.devices or 1)
    return size.interval(name)


def _scale(axes: Axes, panel: Panel) -> None:
    """The vertical axis of a panel, with plain numbers."""
    axis = axes.yaxis
    if panel.scale in ("log", "ratio"):  # ratios by factors of two, as the sizes are
        axes.set_yscale("log", base=2 if panel.scale == "ratio" else 10)
        axis.set_minor_locator(ticker.NullLocator())
    low, high = axes.get_ylim()
    if panel.scale == "ratio" and high / low < 4:
        axis.set_major_locator(ticker.AutoLocator())
    if panel.scale == "log":
        if high / low < 2:  # noise does not fill the page
            middle = math.sqrt(low * high)
            low, high = axes.set_ylim(middle / math.sqrt(2), middle * math.sqrt(2))
        # The more powers of ten, the fewer ticks of each.
        steps: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 30 else (1, 2, 5)
        steps = steps if high / low < 2000 else (1,)
        every = ticker.LogLocator(subs=steps, numticks=30)
        axis.set_major_locator(ticker.AutoLocator() if high / low < 4 else every)
    elif panel.scale == "near":
        # The axis spans a tenth of its values at least, so that a small difference looks small.
        margin = max(0.0, 0.1 * abs(high) - (high - low)) / 2
        axes.set_ylim(max(0.0, low - margin), high + margin)
    elif panel.scale != "ratio":
        axes.set_ylim(0, max(1.1, high) if panel.scale == "share" else 1.1 * high)
    percent = ticker.PercentFormatter(1.0, decimals=0)
    axis.set_major_formatter(percent if panel.scale == "share" else style.PLAIN)
    if panel.name == "val_accuracy":
        style.share_axis(axes)


def mark_not_ok(axes: Axes, sizes: Sequence[Size]) -> None:
    """Mark the sizes with runs that are not ok: a cross at the lower edge and their statuses."""
    marks: dict[int, Counter[str]] = {}
    for size in sizes:
        if size.not_ok:
            marks.setdefault(size.devices or 0, Counter()).update(size.not_ok)
    place, last = axes.get_xaxis_transform(), max(s.devices or 0 for s in sizes)
    for n, counts in marks.items():
        axes.plot(n, 0.04, **style.NOT_OK, transform=place, zorder=4, label=style.FAILED)
        text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        beside: Any = {"ha": "right", "xytext": (-8, -4)} if n == last else {"xytext": (8, -4)}
        beside |= {"xycoords": place, "textcoords": "offset points", "fontsize": 8}
        axes.annotate(text, (n, 0.04), color="#333333", **beside)
    if marks:
        axes.margins(y=0.15)  # no mark hides a point


def comparison_figure(results: Results) -> Figure | None:
    """Rate, peak memory and efficiency of each series at the largest size that most of them have.

    Series of one process (single, dp) have no such size: they stand beside it at their own.
    """
    rated = [s for s in results.sizes if s.throughput is not None and s.devices]
    groups: dict[tuple[str | None, str, int, int], list[Size]] = {}
    for size in [s for s in rated if s.strategy not in ONE_RANK] or rated:
        place = size.scaling, size.throughput_unit, size.devices or 0, size.nodes or 1
        groups.setdefault(place, []).append(size)
    if not groups:
        return None
    place = max(groups, key=lambda place: (len(groups[place]), place[2]))
    (scaling, rate, devices, nodes), shared = place, groups[place]
    alone = [s for s in rated if s.strategy in ONE_RANK and s not in shared]
    sizes = [s for s in alone if (s.scaling, s.throughput_unit) == (scaling, rate)] + shared
    names, note = style.fastest(results, (s.series for s in sizes), _MAX_BARS)
    shown = [s for s in sizes if s.series in names]
    if len(shown) < 2:
        return None
    memory = "per GPU, allocated" if style.unit(results) == "GPUs" else "per process, resident"
    # Of each repeat; the first one is their median.
    panels: dict[str, list[Sequence[float]]] = {
        f"throughput ({rate})": [(s.throughput or 0, *s.rates) for s in shown],
        f"peak memory (MiB)\n{memory}": [
            (s.peak_memory_mib, *s.peaks_memory_mib) if s.peak_memory_mib else () for s in shown
        ],
        "parallel efficiency\nas in the table": [
            (s.efficiency,) if s.efficiency else () for s in shown
        ],
    }
    panels = {label: bars for label, bars in panels.items() if any(bars)}
    on = f" on {nodes} nodes" if nodes > 1 else ""
    title = f"{results.name}: side by side at {counted_ranks(devices, style.unit(results))}{on}"
    figure, axes = style.new_figure(len(panels), title + note, style.subtitle(results))
    figure.set_figheight(2.2 + 0.42 * len(shown))
    look = style.looks(s.series for s in results.sizes)
    for panel, (label, bars) in zip(axes, panels.items(), strict=True):
        percent = "efficiency" in label
        large = max(bar[0] for bar in bars if bar) >= 1000
        form = "{:.0%}" if percent else "{:,.0f}" if large else "{:.4g}"
        for y, (size, bar) in enumerate(zip(shown, bars, strict=True)):
            if bar:
                panel.barh(y, bar[0], 0.6, color=look[size.series]["color"], alpha=0.85)
                panel.hlines(y, min(bar), max(bar), color="black", lw=1.4)
                beside: Any = {"textcoords": "offset points", "va": "center"}
                panel.annotate(form.format(bar[0]), (max(bar), y), (4, 0), **beside)
        panel.set_xlim(0, 1.3 * panel.get_xlim()[1])  # room for the numbers
        panel.xaxis.set_major_locator(ticker.MaxNLocator(3))
        shares = ticker.PercentFormatter(1.0, decimals=0)
        panel.xaxis.set_major_formatter(shares if percent else style.PLAIN)
        # The first series is on top, also where it has no bar.
        panel.set_ylim(len(shown) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")
        panel.set_xlabel(label)
        panel.set_yticks(range(len(shown)), [""] * len(shown))
    labels = [
        style.short(s.series) + ("" if s.devices == devices else f"\nat {s.devices}") for s in shown
    ]
    axes[0].set_yticks(range(len(shown)), labels)
    return figure
