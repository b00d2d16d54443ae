"""The figures of a study: which there are, what they say, and that of the time per epoch.

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

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.breakdown import breakdown_figure
from jobkit.analysis.figures.comparison import comparison_figure
from jobkit.analysis.figures.drawing import (
    draw_line,
    ideal_line,
    legend,
    lines,
    mark_not_ok,
    save,
    unit,
)
from jobkit.analysis.figures.learning import learning_figure
from jobkit.analysis.figures.loss import loss_figure
from jobkit.analysis.figures.memory import memory_figure, predicted_memory_figure
from jobkit.analysis.figures.scaling import efficiency_figure, forecast_figure, speed_up_figure
from jobkit.analysis.figures.style import log_time_axis, looks, new_figure, rc, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.figures.throughput import throughput_figure, time_to_accuracy_figure
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.errors import UsageError

# By the file's name: what a figure says, for those who read and for those who cannot see it.
CAPTIONS = {
    "time_per_epoch": "Time of one epoch at each size; the grey line is what no loss would give.",
    "throughput": "Training images a second, of all ranks together and of each.",
    "speed_up": "How many times faster than the smallest size.",
    "efficiency": "The part of the ideal speed-up that is reached.",
    "forecast": "Measured speed-up, and beyond it what the fitted law foretells: not measured.",
    "breakdown": "Where the time of an iteration goes: means over the ranks, below as shares. "
    "Waiting for a slower rank is part of exposed communication; the table tells them apart.",
    "comparison": "Each series at the largest size that most of them share.",
    "loss_and_accuracy": "What the runs learn: validation loss and accuracy over epochs.",
    "loss_every_size": "Does the batch hurt? Sizes that lie on each other in the upper row learn "
    "the same from an epoch; the lower row is what that costs in time.",
    "time_to_accuracy": "Training time to the same accuracy; the grey line is what no loss would "
    "give.",
    "peak_memory": "The highest use of memory at each size.",
    "memory_predicted": "Parameters, gradients, optimizer state and buffers of the fullest rank: "
    "a dot in its ring is a prediction that holds.",
}
# A study without one of these is told so; the others need records or sizes that few have.
_OF_EVERY_STUDY = ("time_per_epoch", "speed_up", "efficiency", "loss_and_accuracy", "peak_memory")


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
            if figure is None and name in _OF_EVERY_STUDY:
                drawn.skipped.append(name)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn


def makers(forecasts: Sequence[Forecast] = ()) -> dict[str, Callable[[Results], Figure | None]]:
    """By its file's name, what makes each figure; None is what it makes of nothing to show."""
    return {
        "time_per_epoch": time_figure,
        "throughput": throughput_figure,
        "speed_up": speed_up_figure,
        "efficiency": efficiency_figure,
        "forecast": lambda results: forecast_figure(results, forecasts),
        "breakdown": breakdown_figure,
        "comparison": comparison_figure,
        "loss_and_accuracy": learning_figure,
        "loss_every_size": loss_figure,
        "time_to_accuracy": time_to_accuracy_figure,
        "peak_memory": memory_figure,
        "memory_predicted": predicted_memory_figure,
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
    title = f"{results.name}: time per epoch"
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
    ideal_line(axes, x, y)
