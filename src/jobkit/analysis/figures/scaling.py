"""The figures of scaling: speed-up, parallel efficiency, and the forecast beyond what was run."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import ideal_line, legend, plot_line, unit
from jobkit.analysis.figures.style import GREY, Look, log_ratio_axis, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.findings.forecast import Forecast


def speed_up_figure(results: Results) -> Figure | None:
    """Speed-up over world sizes with its interval, and the ideal; strong and weak apart."""
    return _figure(results, "speed_up", "speed-up")


def efficiency_figure(results: Results) -> Figure | None:
    """Parallel efficiency over world sizes with its interval; the ideal is 100 %."""
    return _figure(results, "efficiency", "parallel efficiency")


def forecast_figure(results: Results, forecasts: Sequence[Forecast]) -> Figure | None:
    """Measured speed-up, and beyond it what the fitted laws foretell, dashed in its interval."""
    told = [f for f in forecasts if f.fits and f.sizes]
    panels = [k for k in ("strong", "weak") if any(f.scaling == k for f in told)]
    if not panels:
        return None
    title = f"{results.name}: forecast of the speed-up (not measured)"
    figure, axes = new_figure(len(panels), title, subtitle(results, "median"))
    look = looks(results.scaling["series"].dropna())
    for one, scaling in zip(axes, panels, strict=True):
        own = [f for f in told if f.scaling == scaling]
        rows = _known(results.scaling, "speed_up", scaling)
        _ideal(one, rows, "speed_up", max(f.sizes[-1] for f in own))
        for forecast in own:
            line = look[forecast.series]
            interval_line(one, rows[rows["series"] == forecast.series], "speed_up", line)
            _band(one, forecast, line)
        _axes(one, results, "speed_up", [*rows["world_size"], *(n for f in own for n in f.sizes)])
        one.axvspan(max(f.measured[-1] for f in own), one.get_xlim()[1], color="#F4F4F4", zorder=0)
    shown = {f.series: look[f.series] for f in told}
    dashed = Line2D([], [], color=GREY, ls=(0, (4, 2)), lw=1.4, label="forecast by the fitted law")
    band = Patch(color=GREY, alpha=0.25, lw=0, label="95 % prediction interval")
    legend(figure, axes, shown, [dashed, band])
    return figure


def _figure(results: Results, name: str, words: str) -> Figure | None:
    table = results.scaling
    panels = [k for k in ("strong", "weak") if _known(table, name, k)["world_size"].nunique() > 1]
    if not panels:
        return None
    figure, axes = new_figure(len(panels), f"{results.name}: {words}", subtitle(results, "median"))
    look = looks(table["series"].dropna())
    for one, scaling in zip(axes, panels, strict=True):
        rows = _known(table, name, scaling)
        _ideal(one, rows, name, int(rows["world_size"].max()))
        for _, line in rows.groupby(["series", placement(rows)], sort=False):
            interval_line(one, line, name, look[line["series"].iloc[0]])
        _axes(one, results, name, list(rows["world_size"]))
        what = f"{words}, {scaling} scaling" if len(panels) > 1 else words
        one.set_ylabel(f"{what}\nrelative to {_base(rows)}")
    bars = rows_with_interval(table, name)
    extra = [Line2D([], [], color=GREY, marker="|", ms=11, ls="", label="bootstrap interval")]
    legend(figure, axes, look, extra if bars else [])
    return figure


def rows_with_interval(table: pd.DataFrame, name: str) -> bool:
    """Whether any size beyond its baseline has an interval."""
    beyond = table[(table["world_size"] > table["base_world_size"]).fillna(False)]
    return bool(beyond[f"{name}_low"].notna().any())


def _known(table: pd.DataFrame, name: str, scaling: str) -> pd.DataFrame:
    """The rows of a kind of scaling that have the value."""
    return table[(table["scaling"] == scaling).fillna(False) & table[name].notna()]


def placement(rows: pd.DataFrame) -> pd.Series:
    """0 for the fewest nodes on which a series has a size, 1 for the next: a line each."""
    return rows.groupby(["series", "world_size"])["nodes"].rank("dense").astype(int)


def _base(rows: pd.DataFrame) -> str:
    bases = sorted(int(n) for n in rows["base_world_size"].dropna().unique())
    if len(bases) > 1:
        return "the smallest size of each series"
    return f"{bases[0]} rank{'' if bases[0] == 1 else 's'}"


def interval_line(axes: Axes, rows: pd.DataFrame, name: str, look: Look) -> None:
    """A series: its values as a line, the interval of each as a bar with ends."""
    x, y = rows["world_size"].astype(float), rows[name].astype(float)
    plot_line(axes, x, y, look)
    known = rows[rows[f"{name}_low"].notna()]
    low, high = (known[f"{name}_{end}"].astype(float).to_numpy() for end in ("low", "high"))
    at = known["world_size"].astype(float).to_numpy()
    axes.vlines(at, low, high, color=look.colour, lw=1.6, zorder=2)
    for ends in (low, high):
        axes.plot(at, ends, "_", color=look.colour, ms=9, mew=1.6, zorder=2, label="interval")


def _ideal(axes: Axes, rows: pd.DataFrame, name: str, last: int) -> None:
    """The line of no loss, from the smallest size of all series to the largest."""
    first = int(rows["base_world_size"].min())
    x = np.geomspace(first, last, 65)
    y = np.ones_like(x) if name == "efficiency" else x / first
    ideal_line(axes, x, y)


def _band(axes: Axes, forecast: Forecast, look: Look) -> None:
    """The law from the largest measured size on, and its prediction interval."""
    law, base = forecast.fits[0], forecast.base.world_size or 1
    x = np.geomspace(forecast.measured[-1], forecast.sizes[-1], 65)
    one = law.rate(base)
    y = np.asarray([law.rate(n) for n in x]) / one
    ends = np.asarray([law.interval(n) for n in x]) / one
    axes.plot(x, y, color=look.colour, ls=(0, (4, 2)), lw=1.4, zorder=2.5, label="forecast")
    axes.fill_between(x, ends[:, 0], ends[:, 1], color=look.colour, alpha=0.18, lw=0, zorder=1)


def _axes(axes: Axes, results: Results, name: str, sizes: list[int]) -> None:
    if name == "efficiency":
        top = max(1.1, axes.get_ylim()[1])
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axes.set_ylabel("speed-up")
        log_ratio_axis(axes)
    size_axis(axes, [int(n) for n in sizes], unit(results))
