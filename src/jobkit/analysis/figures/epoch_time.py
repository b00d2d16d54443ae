"""The figure of the time per epoch (or amount of work) over sizes, with its ideal lines."""

from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import (
    Kind,
    draw_line,
    ideal_line,
    kind_of,
    kinds_of,
    legend,
    lines,
    mark_not_ok,
    unit,
)
from jobkit.analysis.figures.style import log_time_axis, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size


def time_figure(results: Results) -> Figure | None:
    """Time per epoch over world sizes, both at their real positions, with the ideal lines.

    Strong scaling: time per epoch; ideal is base time x base size / size. Weak scaling: time for
    the same number of samples per rank as at the smallest size; ideal is constant. A program
    without epochs: the time of a stated amount of work, or of the run.
    """
    found = [s for s in results.sizes if s.world_size]
    kinds = [k for k in kinds_of(found) if any(_times(s) for s in found if kind_of(s) == k)]
    if not kinds:
        return None
    title = f"{results.name}: {_words(found)}"
    figure, axes = new_figure(len(kinds), title, subtitle(results))
    look = looks(s.series for s in found)
    for one, kind in zip(axes, kinds, strict=True):
        own = [s for s in found if kind_of(s) == kind]
        one.set_yscale("log")
        for line in lines(own):
            draw_line(one, line, look[line[0].series], _times)
            _draw_ideal(one, line)
        mark_not_ok(one, own, look)
        log_time_axis(one)
        size_axis(one, [s.devices or 0 for s in own], unit(results))
        one.set_ylabel(_time_label(kind, own))
    legend(figure, axes, look)
    return figure


def _times(size: Size) -> tuple[float, ...]:
    """What the time figure shows of a size: every repeat."""
    if size.scaling != "weak" or not size.base_world_size or not size.world_size:
        return size.times_s
    share = size.world_size / size.base_world_size
    return tuple(t * share for t in size.times_s)


def _words(own: list[Size]) -> str:
    """What the time is of, in words."""
    of = {s.time_of for s in own}
    return f"time per {of.pop()}" if len(of) == 1 else "time per amount of work"


def _time_label(kind: Kind, own: list[Size]) -> str:
    if kind.scaling != "weak":
        return f"{_words(own)} (s)"
    bases = {s.base_world_size for s in own if s.base_world_size}
    smallest = "" if bases == {1} else " / smallest size"
    return f"{_words(own)} \N{MULTIPLICATION SIGN} ranks{smallest} (s)"


def _draw_ideal(axes: Axes, line: list[Size]) -> None:
    """From the smallest size that was measured: strong falls as 1 / size, weak stays."""
    known = [s for s in line if _times(s)]
    if len(known) < 2:
        return
    time, first = median(_times(known[0])), known[0].world_size or 0
    # Many points: on a linear axis the ideal is a curve.
    x = np.geomspace(first, max(s.world_size or 0 for s in line), 65)
    y = np.full_like(x, time) if known[0].scaling == "weak" else time * first / x
    ideal_line(axes, x, y)
