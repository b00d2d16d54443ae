"""The figures of a study: time per epoch, learning curves, peak memory.

    draw(results)       writes logs/STUDY/figures/*.png and *.svg

Each *_figure function makes one matplotlib Figure from results and has no other effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect import Results
from jobkit.analysis.curves import learning_figure
from jobkit.analysis.drawing import (
    IDEAL,
    draw_line,
    legend,
    lines,
    mark_not_ok,
    on_gpu,
    save,
    unit,
)
from jobkit.analysis.forecast import Forecast
from jobkit.analysis.scaling_figures import efficiency_figure, forecast_figure, speed_up_figure
from jobkit.analysis.sizes import Size, sizes
from jobkit.analysis.style import GREY, log_time_axis, looks, new_figure, rc, size_axis
from jobkit.analysis.subtitle import subtitle
from jobkit.errors import UsageError

_MIB_A_GIB = 1024


@dataclass(frozen=True)
class Drawn:
    """The files that were written, and the names of figures that would show nothing."""

    paths: list[Path]
    skipped: list[str]


def draw(results: Results, forecasts: Sequence[Forecast] = ()) -> Drawn:
    """Make and save every figure that has something to show; remove the others' old files.

    Raises UsageError where the study's folder cannot be written.
    """
    drawn = Drawn([], [])
    folder = results.paths.figures
    try:
        folder.mkdir(exist_ok=True)
        for name, make in makers(forecasts).items():
            with rc():
                figure = make(results)
                for path in (folder / f"{name}.png", folder / f"{name}.svg"):
                    if figure is None:
                        path.unlink(missing_ok=True)
                    else:
                        save(figure, path)
                        drawn.paths.append(path)
            if figure is None and (name != "forecast" or forecasts):
                drawn.skipped.append(name)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn


def makers(forecasts: Sequence[Forecast] = ()) -> dict[str, Callable[[Results], Figure | None]]:
    """By its file's name, what makes each figure; None is what it makes of nothing to show."""
    return {
        "time_per_epoch": time_figure,
        "speed_up": speed_up_figure,
        "efficiency": efficiency_figure,
        "forecast": lambda results: forecast_figure(results, forecasts),
        "loss_and_accuracy": learning_figure,
        "peak_memory": memory_figure,
    }


def time_figure(results: Results) -> Figure | None:
    """Time per epoch over world sizes, both at their real positions, with the ideal lines.

    Strong scaling: the time of an epoch; ideal is base time x base size / size. Weak scaling: each
    rank's share of an epoch is held at what it is at the smallest size, so that ideal is flat.
    """
    found = [s for s in sizes(results.runs) if s.world_size]
    panels = [k for k in ("strong", "weak") if any(_times(s) for s in found if s.scaling == k)]
    if not panels:
        return None
    title = f"{results.folder.resolve().name}: time per epoch"
    figure, axes = new_figure(len(panels), title, subtitle(results))
    look = looks(s.series for s in found)
    for one, scaling in zip(axes, panels, strict=True):
        own = [s for s in found if s.scaling == scaling]
        one.set_yscale("log")
        for line in lines(own):
            draw_line(one, line, look[line[0].series], _times)
            _draw_ideal(one, line)
        mark_not_ok(one, own, look)
        log_time_axis(one)
        size_axis(one, [s.world_size or 0 for s in own], unit(results))
        one.set_ylabel(_time_label(scaling, own))
    legend(figure, axes, look)
    return figure


def memory_figure(results: Results) -> Figure | None:
    """Peak memory of the fullest GPU (on the CPU: process) over world sizes, from zero."""
    found = [s for s in sizes(results.runs) if s.world_size]
    if not any(s.peaks_memory_mib for s in found):
        return None
    gpus = on_gpu(results)
    what = "peak memory per GPU" if gpus else "peak memory per process"
    figure, (axes,) = new_figure(1, f"{results.folder.resolve().name}: {what}", subtitle(results))
    look = looks(s.series for s in found)
    large = max(m for s in found for m in s.peaks_memory_mib) >= 10 * _MIB_A_GIB
    factor = 1 / _MIB_A_GIB if large else 1.0

    def peaks(size: Size) -> tuple[float, ...]:
        return tuple(m * factor for m in size.peaks_memory_mib)

    for line in lines(found):
        draw_line(axes, line, look[line[0].series], peaks)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    mark_not_ok(axes, found, look)
    size_axis(axes, [s.world_size or 0 for s in found], unit(results))
    kind = "allocated" if gpus else "resident"
    axes.set_ylabel(f"{what}, {kind} ({'GiB' if large else 'MiB'})")
    legend(figure, [axes], look)
    return figure


def _times(size: Size) -> tuple[float, ...]:
    """What the time figure shows of a size: every repeat."""
    if size.scaling != "weak" or not size.base_world_size or not size.world_size:
        return size.times_per_epoch_s
    share = size.world_size / size.base_world_size
    return tuple(t * share for t in size.times_per_epoch_s)


def _time_label(scaling: str, own: list[Size]) -> str:
    if scaling == "strong":
        return "time per epoch (s)"
    bases = {s.base_world_size for s in own if s.base_world_size}
    smallest = "" if bases == {1} else " / smallest size"
    return f"time per epoch \N{MULTIPLICATION SIGN} ranks{smallest} (s)"


def _draw_ideal(axes: Axes, line: list[Size]) -> None:
    """From the smallest size that was measured: strong falls as 1 / size, weak stays."""
    known = [s for s in line if _times(s)]
    if len(known) < 2:
        return
    time, first = median(_times(known[0])), known[0].world_size or 0
    # Many points: on a linear axis the ideal is a curve.
    x = np.geomspace(first, max(s.world_size or 0 for s in line), 65)
    y = np.full_like(x, time) if known[0].scaling == "weak" else time * first / x
    axes.plot(x, y, color=GREY, lw=0.9, zorder=1.5, label=IDEAL)
