"""The figures of a value over sizes: a table of what each shows, and one function that draws it.

They are of the kind of scaling and the unit that are first in the table. Medians are lines; a bar
is the interval between runs or, of a value without one, the range of the repeats. At the end, all
series at one size as bars.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.findings.causes import rows_of
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.findings.verdict import first_kind, percent
from jobkit.analysis.scaling import MIN_EFFICIENCY
from jobkit.analysis.scaling.sizes import Size, fewest_nodes, numbers_of, time_of, where
from jobkit.analysis.tables.text import counted, rounded

_MAX_BARS = 12  # under each other
Values = tuple[float, ...]  # of each repeat, or one of their size


class Panel(NamedTuple):
    """A value over sizes."""

    name: str  # of a field of Size, or of OF_RUNS
    label: str
    scale: str = "zero"  # zero and share (linear, from 0), near (linear) or log
    ideal: Callable[[NDArray[Any]], NDArray[Any]] | None = None  # of size / smallest size


OF_RUNS = ("val_loss", "val_accuracy")  # columns of the runs
_EFFICIENCY = "parallel efficiency\nrelative to {base}"
BY_SIZE = {
    "time_per_epoch": [Panel("time_s", "time per {of} (s)", "log", np.reciprocal)],
    "throughput": [
        Panel("throughput", "throughput ({rate})", "log", np.positive),
        Panel("throughput_per_rank", "throughput per {rank} ({rate})", "zero", np.ones_like),
    ],
    "speed_up": [Panel("speed_up", "speed-up\nrelative to {base}", "log", np.positive)],
    "efficiency": [Panel("efficiency", _EFFICIENCY, "share", np.ones_like)],
    "time_to_accuracy": [
        Panel("time_to_accuracy_s", "time to {target} accuracy (s)", "log", np.reciprocal)
    ],
    "loss_and_accuracy_by_size": [
        Panel("val_loss", "final validation loss", "near"),
        Panel("val_accuracy", "final validation accuracy", "near"),
    ],
    "peak_memory": [Panel("peaks_memory_mib", "peak memory per {rank}, {kind} (MiB)")],
}


def size_figure(results: Results, name: str, forecasts: Sequence[Forecast] = ()) -> Figure | None:
    """A figure of BY_SIZE, forecasts in the speed-up; None below two world sizes with a value."""
    sizes = [s for s in first_kind(results.sizes) if s.world_size]
    of_panels = [
        (panel, {s: v for s in sizes if (v := _values(results, s, panel.name))})
        for panel in BY_SIZE[name]
    ]
    known = [(p, values) for p, values in of_panels if len({s.world_size for s in values}) > 1]
    if not known:
        return None
    words = _words(results, sizes)
    texts = [panel.label.format(**words).split("\n") for panel, _ in known]
    labels = [text[0] for text in texts]
    title = " and ".join(dict.fromkeys(label.split(" (")[0] for label in labels))
    if len({s.scaling for s in results.sizes}) > 1:
        title += f", {sizes[0].scaling or 'unstated'} scaling"
    figure, axes = style.new_figure(len(known), title, results, more=texts[0][1:])
    look = style.looks(s.series for s in results.sizes if s.world_size)
    beyond = [f for f in forecasts if f.base in sizes] if name == "speed_up" else []
    places = [s.devices or 0 for s in sizes] + [n for f in beyond for n in f.sizes]
    for panel_axes, label, (panel, values) in zip(axes, labels, known, strict=True):
        for series in dict.fromkeys(s.series for s in values):
            line = fewest_nodes(list(values), series)
            own = look[series]
            if line and line[0].note:  # its sizes must not be compared
                own = own | {"ls": "", "label": f"{own['label']}: not compared"}
            _draw_line(panel_axes, {s: values[s] for s in line}, own, panel.name)
            hollow = look[series] | {"ls": "", "mfc": "none", "label": style.ON_MORE}
            for size in (s for s in values if s.series == series and s not in line):
                panel_axes.plot(size.devices or 0, median(values[size]), **hollow)
            if panel.ideal and len(line) > 1 and not line[0].note:
                first, smallest = line[0], line[0].devices or 1
                # What is relative to a base has a known ideal, also where the base is another
                # series. The line ends at the largest size that was planned.
                relative = {"speed_up": smallest / (first.base_world_size or 1), "efficiency": 1.0}
                start = relative.get(panel.name, median(values[first]))
                ratio = np.geomspace(1, max(places) / smallest, 65)
                grey: Any = {"color": style.GREY, "label": style.IDEAL, "zorder": 1.5}
                panel_axes.plot(smallest * ratio, start * panel.ideal(ratio), lw=0.9, **grey)
        for n in {s.devices or 0 for s in sizes if s.not_ok}:
            cross: Any = {"transform": panel_axes.get_xaxis_transform(), "zorder": 4}
            panel_axes.plot(n, 0.04, **style.NOT_OK, **cross, label=style.FAILED)
            panel_axes.margins(y=0.15)  # no cross hides a point
        _scale(panel_axes, panel)
        style.size_axis(panel_axes, places, style.unit(results))
        if beyond:
            _draw_forecasts(panel_axes, beyond, look)
        panel_axes.set_ylabel(label)
    style.legend(figure, axes)
    return figure


def _draw_forecasts(axes: Axes, forecasts: Sequence[Forecast], look: dict[str, style.Look]) -> None:
    """Draw each forecast with its interval, from the largest measured size on."""
    for forecast in forecasts:
        x = np.geomspace(forecast.prediction.sizes[-1], max(forecast.sizes), 33)
        y, low, high = np.asarray([forecast.speed_up(n) for n in x]).T
        own: Any = {"color": look[forecast.base.series]["color"]}
        axes.plot(x, y, ls=(0, (4, 2)), lw=1.4, zorder=2.5, label=style.FORECAST, **own)
        axes.fill_between(x, low, high, alpha=0.18, lw=0, zorder=1, label=style.BAND, **own)
    last = max(f.prediction.sizes[-1] for f in forecasts)
    axes.axvspan(last, axes.get_xlim()[1], color="#F4F4F4", zorder=0)


def _values(results: Results, size: Size, name: str) -> Values:
    """The value of a size, or those of its runs that are ok."""
    if name in OF_RUNS:
        return numbers_of(rows_of(results, size), name)
    value = getattr(size, name)
    if isinstance(value, tuple):
        return value
    return () if value is None else (value,)


def _words(results: Results, sizes: Sequence[Size]) -> dict[str, str]:
    """What titles and labels name."""
    unit = style.unit(results)
    bases = {(s.base_series, s.base_world_size) for s in sizes if s.base_series}
    base = "the base of each series"
    if len(bases) == 1:
        ((series, ranks),) = bases
        base = f"{style.short(series or '')} on {counted(ranks or 0, 'rank')}"
    words = {"rank": unit[:-1], "kind": "allocated" if unit == "GPUs" else "resident"}
    words |= {"of": time_of(sizes), "base": base}
    goal = f"{sizes[0].target_accuracy or 0:.0%}"
    return words | {"rate": sizes[0].throughput_unit, "target": goal}


def _draw_line(axes: Axes, points: Mapping[Size, Values], look: style.Look, name: str) -> None:
    """Draw medians as a line, with a bar for the interval or the range of each value's repeats."""
    x = [s.devices or 0 for s in points]
    axes.plot(x, [median(values) for values in points.values()], **look)
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
    if panel.scale == "log":
        axes.set_yscale("log")
        axis.set_minor_locator(ticker.NullLocator())
        low, high = axes.get_ylim()
        if high / low < 2:  # noise does not fill the page
            axes.set_ylim(low / 1.3, high * 1.3)
        steps = ticker.LogLocator(subs=(1, 2, 5))
        axis.set_major_locator(ticker.AutoLocator() if high / low < 10 else steps)
    elif panel.scale == "near":
        low, high = axes.get_ylim()
        margin = max(0.0, 0.1 * abs(high) - (high - low)) / 2  # a small difference looks small
        axes.set_ylim(low - margin, high + margin)
    else:
        high = axes.get_ylim()[1]
        axes.set_ylim(0, max(1.1, high) if panel.scale == "share" else 1.1 * high)
    axis.set_major_formatter(style.SHARE if panel.scale == "share" else style.PLAIN)
    if panel.name == "val_accuracy":
        style.share_axis(axes)


def comparison_figure(results: Results) -> Figure | None:
    """Rate, peak memory and efficiency of each series at the largest size that most have."""
    groups: dict[tuple[int, int], list[Size]] = {}
    for size in first_kind(results.sizes):
        if size.throughput is not None and size.devices:
            groups.setdefault((size.devices, size.nodes or 1), []).append(size)
    # One process is compared where nothing else is: how series scale shows on several.
    several = [own for own in groups.values() if len(own) > 1]
    group = max(several, key=lambda g: (g[0].devices != 1, len(g), g[0].devices), default=None)
    if group is None:
        return None
    names, note = style.fastest(results, (s.series for s in group), _MAX_BARS)
    shown = [s for s in group if s.series in names]
    memory = "per GPU, allocated" if style.unit(results) == "GPUs" else "per rank, resident"
    columns = {
        f"throughput ({shown[0].throughput_unit})": [s.throughput for s in shown],
        f"peak memory (MiB)\n{memory}": [s.peak_memory_mib for s in shown],
        "parallel efficiency\nas in the table": [s.efficiency for s in shown],
    }
    series = [style.short(s.series) for s in shown]
    table = pd.DataFrame(columns, index=series, dtype=float).dropna(axis=1, how="all")
    title = f"side by side at {where(shown[0], style.unit(results))}"
    figure, axes = style.new_figure(table.shape[1], title + note, results)
    figure.set_figheight(2.2 + 0.42 * len(shown))
    look = style.looks(s.series for s in results.sizes)
    colours = [look[s.series]["color"] for s in shown]
    for panel, (label, values) in zip(axes, table.items(), strict=True):
        values.plot.barh(ax=panel, color=colours, width=0.6, alpha=0.85)
        share = "efficiency" in str(label)
        texts = [percent(v, MIN_EFFICIENCY) if share else rounded(v) for v in values]
        bars: Any = panel.containers[0]
        numbers = ["" if pd.isna(v) else text for v, text in zip(values, texts, strict=True)]
        panel.bar_label(bars, numbers, padding=4)
        panel.margins(x=0.3)  # room for the numbers
        panel.xaxis.set_major_locator(ticker.MaxNLocator(3))
        panel.xaxis.set_major_formatter(style.SHARE if share else style.PLAIN)
        panel.invert_yaxis()  # the first series is on top
        panel.grid(visible=False, axis="y")
        panel.set_xlabel(str(label))
        panel.set_yticks(range(len(shown)), series if panel is axes[0] else [""] * len(shown))
    return figure
