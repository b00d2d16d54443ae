"""The figure of the time of single steps: median, 95th and 99th percentile at each size."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import plot_line, unit
from jobkit.analysis.figures.style import (
    DASHES,
    GREY,
    Look,
    legend_below,
    log_time_axis,
    looks,
    new_figure,
    size_axis,
)
from jobkit.analysis.figures.subtitle import subtitle

_SHOWN = {
    "step_p50_s": "median",
    "step_p95_s": "95th percentile",
    "step_p99_s": "99th percentile",
}


def step_figure(results: Results) -> Figure | None:
    """A line for each series and percentile, medians over the repeats that are ok.

    None where no run has single steps.
    """
    runs = results.runs[results.runs["status"] == "ok"]
    known = runs.dropna(subset=["world_size", *_SHOWN])
    known = known[(known[list(_SHOWN)] > 0).all(axis=1)]
    if known.empty:
        return None
    title = f"{results.name}: time of a step"
    figure, (axes,) = new_figure(1, title, subtitle(results, "median"))
    look = looks(s.series for s in results.sizes)
    axes.set_yscale("log")
    for series, own in known.groupby("series"):
        middle = own.groupby("world_size")[list(_SHOWN)].median().astype(float)
        x = [int(n) for n in middle.index]
        for name, dashes in zip(_SHOWN, DASHES, strict=False):
            plot_line(axes, x, middle[name], look[str(series)], ls=dashes)
    log_time_axis(axes)
    size_axis(axes, sorted({int(n) for n in known["world_size"]}), unit(results))
    axes.set_ylabel("time of a step (s)")
    legend_below(figure, _handles(known, look))
    return figure


def _handles(known: pd.DataFrame, look: dict[str, Look]) -> list[Line2D]:
    """Colours and markers tell the series, dashes the percentile."""
    handles = [
        Line2D([], [], color=one.colour, marker=one.marker, ms=5, label=name)
        for name, one in look.items()
        if name in set(known["series"])
    ]
    return handles + [
        Line2D([], [], color=GREY, ls=dashes, label=text)
        for text, dashes in zip(_SHOWN.values(), DASHES, strict=False)
    ]
