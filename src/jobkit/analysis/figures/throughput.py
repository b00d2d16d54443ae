"""The figures of throughput over sizes, and of the time to an accuracy, each with its ideal."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import (
    ideal_line,
    interval_handles,
    interval_line,
    known,
    legend,
    lines,
    on_gpu,
    panels,
    plot_line,
    unit,
)
from jobkit.analysis.figures.style import (
    PLAIN,
    log_axis,
    log_time_axis,
    looks,
    new_figure,
    size_axis,
)
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size


def throughput_figure(results: Results) -> Figure | None:
    """The rate over all ranks, and per rank beside it; a row for each kind of scaling and unit."""
    kinds = panels(results.sizes, "throughput")
    if not kinds:
        return None
    title = f"{results.name}: throughput"
    figure, axes = new_figure(2, title, subtitle(results, "median"), rows=len(kinds))
    look = looks(s.series for s in results.sizes)
    each = "GPU" if on_gpu(results) else "process"
    for i, kind in enumerate(kinds):
        measured, suffix = known(results.sizes, "throughput", kind), kind.suffix(kinds)
        total, single = axes[2 * i : 2 * i + 2]
        total.set_yscale("log")
        for line in lines(measured):
            interval_line(total, line, "throughput", look[line[0].series])
            interval_line(single, line, "throughput_per_rank", look[line[0].series])
            _ideal_rates(total, single, line)
        log_axis(total.yaxis)
        total.set_ylabel(f"{kind.unit}{suffix}")
        single.set_ylim(0, 1.1 * single.get_ylim()[1])
        single.yaxis.set_major_formatter(PLAIN)
        single.set_ylabel(f"{kind.unit} per {each}{suffix}")
        for one in (total, single):
            size_axis(one, [s.devices or 0 for s in measured], unit(results))
    legend(figure, axes, look, interval_handles(results.sizes, "throughput"))
    return figure


def time_to_accuracy_figure(results: Results) -> Figure | None:
    """Training time to the accuracy of scaling.csv over sizes; ideal: half at twice the ranks."""
    kinds = panels(results.sizes, "time_to_accuracy_s")
    if not kinds:
        return None
    target = results.sizes[0].target_accuracy
    title = f"{results.name}: training time to {target:.0%} validation accuracy"
    figure, axes = new_figure(len(kinds), title, subtitle(results, "median"))
    look = looks(s.series for s in results.sizes)
    for one, kind in zip(axes, kinds, strict=True):
        measured = known(results.sizes, "time_to_accuracy_s", kind)
        one.set_yscale("log")
        for line in lines(measured):
            x = [s.devices or 0 for s in line]
            y = [s.time_to_accuracy_s or 0.0 for s in line]
            plot_line(one, x, y, look[line[0].series])
            at = np.geomspace(x[0], x[-1], 65)
            ideal_line(one, at, y[0] * x[0] / at)
        log_time_axis(one)
        size_axis(one, [s.devices or 0 for s in measured], unit(results))
        one.set_ylabel(f"time to {target:.0%} accuracy (s){kind.suffix(kinds)}")
    legend(figure, axes, look)
    return figure


def _ideal_rates(total: Axes, single: Axes, line: list[Size]) -> None:
    """Draw the rates of ideal scaling from the smallest size of a line."""
    if len(line) < 2:
        return
    rate = line[0].throughput_per_rank or 0.0
    x = np.geomspace(line[0].world_size or 1, line[-1].world_size or 1, 65)
    ideal_line(total, x, rate * x)
    ideal_line(single, x, np.full_like(x, rate))
