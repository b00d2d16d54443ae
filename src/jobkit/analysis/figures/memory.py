"""The figures of memory over sizes: peak memory, and persistent memory with its prediction."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import (
    draw_line,
    legend,
    lines,
    mark_not_ok,
    on_gpu,
    plot_line,
    unit,
)
from jobkit.analysis.figures.style import GREY, PLAIN, Look, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size

_MIB_A_GIB = 1024
_HELD, _PREDICTED = "held_memory_mib", "predicted_memory_mib"  # of results.csv


def memory_figure(results: Results) -> Figure | None:
    """Peak memory over world sizes, maximum over ranks."""
    found = [s for s in results.sizes if s.world_size]
    if not any(s.peaks_memory_mib for s in found):
        return None
    gpus = on_gpu(results)
    what = f"peak memory {_each(results)}"
    figure, (axes,) = new_figure(1, f"{results.name}: {what}", subtitle(results))
    look = looks(s.series for s in found)
    factor, text = _unit(max(m for s in found for m in s.peaks_memory_mib))

    def peaks(size: Size) -> tuple[float, ...]:
        return tuple(m * factor for m in size.peaks_memory_mib)

    for line in lines(found):
        draw_line(axes, line, look[line[0].series], peaks)
    _axes(axes, results, found, look)
    axes.set_ylabel(f"{what}, {'allocated' if gpus else 'resident'} ({text})")
    legend(figure, [axes], look)
    return figure


def predicted_memory_figure(results: Results) -> Figure | None:
    """Parameters, gradients, optimizer state and buffers: measured and predicted.

    Maximum over ranks. The prediction of a run that failed counts, too.
    """
    found = [s for s in results.sizes if s.world_size]
    held, predicted = (_medians(results.runs, name) for name in (_HELD, _PREDICTED))
    if held.empty or predicted.empty:
        return None
    title = f"{results.name}: persistent memory, measured and predicted"
    figure, (axes,) = new_figure(1, title, subtitle(results, "median"))
    look = looks(s.series for s in found)
    factor, text = _unit(max(held.max(), predicted.max()))
    for line in lines(found):
        own = look[line[0].series]
        plot_line(axes, *_points(line, held, factor), own)
        x, y = _points(line, predicted, factor)
        plot_line(axes, x, y, own, ls="", mfc="none", ms=own.size + 6, mew=1.4)
    _axes(axes, results, found, look)
    axes.set_ylabel(f"parameters, gradients, optimizer state,\nbuffers {_each(results)} ({text})")
    dot = Line2D([], [], color=GREY, marker="o", ms=6, label="measured")
    ring = Line2D([], [], color=GREY, marker="o", ms=11, mfc="none", ls="", label="predicted")
    legend(figure, [axes], look, [dot, ring])
    return figure


def _each(results: Results) -> str:
    return "per GPU" if on_gpu(results) else "per process"


def _unit(highest: float) -> tuple[float, str]:
    """What MiB are multiplied with for the axis, and its unit: GiB where the values are large."""
    return (1 / _MIB_A_GIB, "GiB") if highest >= 10 * _MIB_A_GIB else (1.0, "MiB")


def _axes(axes: Axes, results: Results, found: list[Size], look: dict[str, Look]) -> None:
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(PLAIN)
    mark_not_ok(axes, found, look)
    size_axis(axes, [s.devices or 0 for s in found], unit(results))


def _medians(runs: pd.DataFrame, name: str) -> "pd.Series[float]":
    """By series and shape (see _key): the median over the runs that have the value, in MiB."""
    known = runs.dropna(subset=[name, "series", "nodes", "ranks_per_node"])
    series, nodes, ranks = (known[k].astype(str) for k in ("series", "nodes", "ranks_per_node"))
    return known[name].astype(float).groupby(series + " " + nodes + " " + ranks).median()


def _key(size: Size) -> str:
    return f"{size.series} {size.nodes} {size.ranks_per_node}"


def _points(
    line: list[Size], values: "pd.Series[float]", factor: float
) -> tuple[list[int], list[float]]:
    """World sizes of a line and their values, where they have one."""
    known = [s for s in line if _key(s) in values]
    return [s.devices or 0 for s in known], [factor * float(values[_key(s)]) for s in known]
