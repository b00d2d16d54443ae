"""The figure of a forecast: the measured speed-up, and beyond it the prediction."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.figures.by_size import draw_line, kind_of, kinds_of, lines_of, suffix
from jobkit.analysis.findings.forecast import Forecast

_DASHED = (0, (4, 2))
_HANDLES: list[Artist] = [
    style.entry("forecast", ls=_DASHED, lw=1.4),
    Patch(color=style.GREY, alpha=0.25, lw=0, label="95 % prediction interval"),
]


def forecast_figure(results: Results, forecasts: Sequence[Forecast]) -> Figure | None:
    """Measured speed-up, and beyond it the forecast with its interval."""
    shown = [f for f in forecasts if f.sizes]
    of_series = {s.series: kind_of(s) for s in results.sizes}
    kinds = [k for k in kinds_of(results.sizes) if any(of_series[f.series] == k for f in shown)]
    if not kinds:
        return None
    title = f"{results.name}: forecast of the speed-up (not measured)"
    figure, axes = style.new_figure(len(kinds), title, style.subtitle(results, "median"))
    look = style.looks(s.series for s in results.sizes)
    for panel, kind in zip(axes, kinds, strict=True):
        of_kind = [f for f in shown if of_series[f.series] == kind]
        measured = [s for s in results.sizes if kind_of(s) == kind and s.speed_up and s.world_size]
        last = max(f.sizes[-1] for f in of_kind)
        first = min(s.base_world_size for s in measured if s.base_world_size)
        x = np.geomspace(first, last, 65)
        style.ideal_line(panel, x, x / first)
        for forecast in of_kind:
            for line in lines_of([s for s in measured if s.series == forecast.series]):
                draw_line(
                    panel, {s: (s.speed_up or 0,) for s in line}, look[forecast.series], "speed_up"
                )
            _band(panel, forecast, look[forecast.series])
        panel.set_ylabel(f"speed-up{suffix(kind, kinds)}")
        style.log_ratio_axis(panel)
        sizes = [*(s.devices or 0 for s in measured), *(n for f in of_kind for n in f.sizes)]
        style.size_axis(panel, sizes, style.unit(results))
        beyond = max(f.measured[-1] for f in of_kind)
        panel.axvspan(beyond, panel.get_xlim()[1], color="#F4F4F4", zorder=0)
    style.legend(figure, axes, {f.series: look[f.series] for f in shown}, _HANDLES)
    return figure


def _band(axes: Axes, forecast: Forecast, look: style.Look) -> None:
    """Draw the forecast from the largest measured size on, with its prediction interval."""
    x = np.geomspace(forecast.measured[-1], forecast.sizes[-1], 33)
    y, low, high = np.asarray([forecast.at(n).speed_up for n in x]).T
    axes.plot(x, y, color=look.colour, ls=_DASHED, lw=1.4, zorder=2.5, label="forecast")
    axes.fill_between(x, low, high, color=look.colour, alpha=0.18, lw=0, zorder=1)
