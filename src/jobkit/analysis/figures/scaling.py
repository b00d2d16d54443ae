"""The figures of scaling: speed-up, parallel efficiency, and the forecast beyond what was run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import (
    Kind,
    ideal_line,
    interval_handles,
    interval_line,
    kind_of,
    kinds_of,
    known,
    legend,
    lines,
    panels,
    unit,
)
from jobkit.analysis.figures.style import GREY, Look, log_ratio_axis, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted

_DASHED = (0, (4, 2))


def speed_up_figure(results: Results) -> Figure | None:
    """Speed-up over world sizes with its interval, and the ideal; strong and weak apart."""
    return _figure(results, "speed_up", "speed-up")


def efficiency_figure(results: Results) -> Figure | None:
    """Parallel efficiency over world sizes with its interval; the ideal is 100 %."""
    return _figure(results, "efficiency", "parallel efficiency")


def forecast_figure(results: Results, forecasts: Sequence[Forecast]) -> Figure | None:
    """Measured speed-up, and beyond it the forecast with its interval."""
    shown = [f for f in forecasts if f.sizes]
    of_series = {s.series: kind_of(s) for s in results.sizes}
    kinds = [k for k in kinds_of(results.sizes) if any(of_series[f.series] == k for f in shown)]
    if not kinds:
        return None
    title = f"{results.name}: forecast of the speed-up (not measured)"
    figure, axes = new_figure(len(kinds), title, subtitle(results, "median"))
    look = looks(s.series for s in results.sizes)
    for one, kind in zip(axes, kinds, strict=True):
        own = [f for f in shown if of_series[f.series] == kind]
        _forecast_panel(one, own, known(results.sizes, "speed_up", kind), look)
        ends = [n for f in own for n in f.sizes]
        _axes(one, results, "speed_up", [*_ranks(results.sizes, kind), *ends])
        one.axvspan(max(f.measured[-1] for f in own), one.get_xlim()[1], color="#F4F4F4", zorder=0)
    legend(figure, axes, {f.series: look[f.series] for f in shown}, _forecast_handles(shown))
    return figure


def _forecast_handles(shown: Sequence[Forecast]) -> list[Artist]:
    """What the legend says of the sources that the forecasts have."""
    handles: list[Artist] = []
    if any(_by_laws(f) for f in shown):
        handles += [
            Line2D([], [], color=GREY, ls=_DASHED, lw=1.4, label="forecast"),
            Patch(color=GREY, alpha=0.25, lw=0, label="95 % prediction interval"),
        ]
    if any(f.by_steps for f in shown):
        label = "forecast by the step model"
        handles.append(Line2D([], [], color=GREY, ls="", marker="D", mfc="none", label=label))
    return handles


def _by_laws(forecast: Forecast) -> list[int]:
    """The sizes that the laws forecast."""
    return [n for n in forecast.sizes if n not in forecast.by_steps]


def _forecast_panel(
    axes: Axes, own: Sequence[Forecast], measured: Sequence[Size], look: dict[str, Look]
) -> None:
    """Draw the forecasts of one kind of scaling, each with what was measured of its series."""
    _ideal(axes, measured, "speed_up", max(f.sizes[-1] for f in own))
    for forecast in own:
        line = look[forecast.series]
        series = [s for s in measured if s.series == forecast.series]
        for part in lines(series):
            interval_line(axes, part, "speed_up", line)
        _band(axes, forecast, line)


def _figure(results: Results, name: str, words: str) -> Figure | None:
    """A value over world sizes, by its column's name: a panel for each kind of scaling and unit."""
    kinds = panels(results.sizes, name)
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds), f"{results.name}: {words}", subtitle(results, "median"))
    look = looks(s.series for s in results.sizes)
    for one, kind in zip(axes, kinds, strict=True):
        measured = known(results.sizes, name, kind)
        _ideal(one, measured, name, max(_ranks(measured, kind)))
        for line in lines(measured):
            interval_line(one, line, name, look[line[0].series])
        _axes(one, results, name, _ranks(measured, kind))
        one.set_ylabel(f"{words}{kind.suffix(kinds)}\nrelative to {_base(measured)}")
    legend(figure, axes, look, interval_handles(results.sizes, name))
    return figure


def _ranks(sizes: Sequence[Size], kind: Kind) -> list[int]:
    return [s.devices or 0 for s in known(sizes, "speed_up", kind)]


def _base(measured: Sequence[Size]) -> str:
    bases = {s.base_world_size for s in measured if s.base_world_size}
    return counted(bases.pop(), "rank") if len(bases) == 1 else "the smallest size of each series"


def _ideal(axes: Axes, measured: Sequence[Size], name: str, last: int) -> None:
    """Draw ideal scaling from the smallest size of all series to the largest."""
    first = min(s.base_world_size for s in measured if s.base_world_size)
    x = np.geomspace(first, last, 65)
    y = np.ones_like(x) if name == "efficiency" else x / first
    ideal_line(axes, x, y)


def _band(axes: Axes, forecast: Forecast, look: Look) -> None:
    """Draw the forecast from the largest measured size on, with its prediction interval.

    Sizes that the step model forecasts are points: it has no interval.
    """
    if taken := [(n, forecast.at(n).speed_up[0]) for n in forecast.by_steps]:
        x, y = np.asarray(taken).T
        axes.plot(x, y, color=look.colour, ls="", marker="D", mfc="none", zorder=2.5)
    if by_laws := _by_laws(forecast):
        made = forecast.prediction
        assert made is not None  # it has sizes
        x = np.geomspace(forecast.measured[-1], by_laws[-1], 33)
        y, low, high = np.asarray([made.speed_up(n) for n in x]).T
        axes.plot(x, y, color=look.colour, ls=_DASHED, lw=1.4, zorder=2.5, label="forecast")
        axes.fill_between(x, low, high, color=look.colour, alpha=0.18, lw=0, zorder=1)


def _axes(axes: Axes, results: Results, name: str, sizes: list[int]) -> None:
    if name == "efficiency":
        top = max(1.1, axes.get_ylim()[1])
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axes.set_ylabel("speed-up")
        log_ratio_axis(axes)
    size_axis(axes, [int(n) for n in sizes], unit(results))
