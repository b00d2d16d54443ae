"""The figure of a forecast: the measured speed-up, and beyond it the prediction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.figures.by_size import draw_line, kind_of, kinds_of, lines_of, suffix
from jobkit.analysis.findings.forecast import Forecast


def forecast_figure(results: Results, forecasts: Sequence[Forecast]) -> Figure | None:
    """Measured speed-up, and beyond the largest measured size the forecast with its interval."""
    shown = [f for f in forecasts if f.sizes]
    kinds = kinds_of(f.base for f in shown)
    if not kinds:
        return None
    title = f"{results.name}: forecast of the speed-up (not measured)"
    figure, axes = style.new_figure(len(kinds), title, style.subtitle(results))
    look = style.looks(s.series for s in results.sizes)
    for panel, kind in zip(axes, kinds, strict=True):
        of_kind = [f for f in shown if kind_of(f.base) == kind]
        series = {f.series for f in of_kind}
        measured = [s for s in results.sizes if s.series in series and s.speed_up and s.world_size]
        for line in lines_of(measured):
            points = {s: (s.speed_up or 0,) for s in line}
            draw_line(panel, points, look[line[0].series], "speed_up")
        for forecast in of_kind:
            x = np.geomspace(forecast.measured[-1], forecast.sizes[-1], 33)
            y, low, high = np.asarray([forecast.speed_up(n) for n in x]).T
            own: Any = {"color": look[forecast.series]["color"]}
            panel.plot(x, y, ls=(0, (4, 2)), lw=1.4, zorder=2.5, label="forecast", **own)
            band = "95 % prediction interval"
            panel.fill_between(x, low, high, alpha=0.18, lw=0, zorder=1, label=band, **own)
        x = np.geomspace(
            min(s.base_world_size or 1 for s in measured), max(f.sizes[-1] for f in of_kind), 65
        )
        style.ideal_line(panel, x, x / x[0])
        panel.set_ylabel(f"speed-up{suffix(kind, kinds)}")
        style.log_ratio_axis(panel)
        sizes = {s.devices or 0 for s in measured} | {n for f in of_kind for n in f.sizes}
        style.size_axis(panel, sizes, style.unit(results))
        beyond = max(f.measured[-1] for f in of_kind)
        panel.axvspan(beyond, panel.get_xlim()[1], color="#F4F4F4", zorder=0)
    style.legend(figure, axes)
    return figure
