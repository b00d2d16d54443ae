"""The figures of a study: a table of all, and `draw`, which writes them.

    draw(results)       writes logs/STUDY/figures/*.png and *.svg

Each *_figure function returns one matplotlib Figure of results and has no other effect. To add a
figure: write its function and add an entry to FIGURES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.breakdown import breakdown_figure
from jobkit.analysis.figures.comparison import comparison_figure
from jobkit.analysis.figures.drawing import save
from jobkit.analysis.figures.epoch_time import time_figure
from jobkit.analysis.figures.learning import learning_figure
from jobkit.analysis.figures.learning_sizes import learning_sizes_figure
from jobkit.analysis.figures.memory import memory_figure
from jobkit.analysis.figures.scaling import efficiency_figure, forecast_figure, speed_up_figure
from jobkit.analysis.figures.step_times import step_figure
from jobkit.analysis.figures.style import rc
from jobkit.analysis.figures.throughput import throughput_figure, time_to_accuracy_figure
from jobkit.analysis.figures.use import energy_figure, load_figure
from jobkit.analysis.findings.forecast import Forecast
from jobkit.errors import UsageError

_NOT_MEASURED = "no successful run has it"
_ONE_SIZE = "fewer than two measured sizes"


@dataclass(frozen=True)
class StudyFigure:
    """One figure: its file's name, its caption, and the function that makes it."""

    name: str
    caption: str  # also the text for those who cannot see it
    make: Callable[..., Figure | None]  # of the results; None: there is nothing to show
    missing: str = ""  # of a figure that every study should have: why it has none
    takes_forecasts: bool = False  # as the second argument of make


# In the order of the report.
FIGURES = (
    StudyFigure(
        "time_per_epoch",
        "Time per epoch, per run or per amount of work, at each size. Grey line: ideal scaling.",
        time_figure,
        _NOT_MEASURED,
    ),
    StudyFigure(
        "throughput",
        "Throughput of the training, over all ranks and per rank. Grey line: ideal scaling.",
        throughput_figure,
    ),
    StudyFigure(
        "speed_up",
        "Speed-up relative to the smallest size. Grey line: ideal scaling.",
        speed_up_figure,
        _ONE_SIZE,
    ),
    StudyFigure(
        "efficiency",
        "Parallel efficiency: the share of the ideal speed-up that is reached.",
        efficiency_figure,
        _ONE_SIZE,
    ),
    StudyFigure(
        "forecast",
        "Measured speed-up and, beyond it, the prediction of an average of laws: not measured.",
        forecast_figure,
        takes_forecasts=True,
    ),
    StudyFigure(
        "breakdown",
        "Time of one iteration by activity: means over ranks, in the lower row as shares. "
        "Waiting for slower ranks is apart from exposed communication; breakdown_communication_s "
        "of results.csv has both.",
        breakdown_figure,
    ),
    StudyFigure(
        "step_times",
        "Time of single steps, without the warm-up: where the percentiles lie far above the "
        "median, some steps wait for a slow rank, for data or for the machine.",
        step_figure,
    ),
    StudyFigure(
        "comparison",
        "Rate, memory and efficiency at the largest size that most parallel series share; single "
        "and dp, which are one process, at their own.",
        comparison_figure,
    ),
    StudyFigure(
        "loss_and_accuracy",
        "Validation loss and accuracy over epochs.",
        learning_figure,
        _NOT_MEASURED,
    ),
    StudyFigure(
        "loss_and_accuracy_by_size",
        "Final validation loss and accuracy at each size: median and range of the repeats.",
        learning_sizes_figure,
    ),
    StudyFigure(
        "time_to_accuracy",
        "Training time to the same validation accuracy. Grey line: ideal scaling.",
        time_to_accuracy_figure,
    ),
    StudyFigure(
        "peak_memory",
        "Peak memory at each size: maximum over ranks.",
        memory_figure,
        _NOT_MEASURED,
    ),
    StudyFigure(
        "load",
        "Load and memory over the time of a run: of the GPUs where they were sampled, else of the "
        "nodes, with all cores. Load below 1 is idle.",
        load_figure,
    ),
    StudyFigure(
        "energy",
        "Energy per unit of work at each size, as counters of the machine measured it.",
        energy_figure,
    ),
)


@dataclass(frozen=True)
class Drawn:
    """The files that were written, and by name why a usual figure is missing."""

    paths: list[Path]
    missing: dict[str, str]


def draw(results: Results, forecasts: Sequence[Forecast] = ()) -> Drawn:
    """Make and save every figure that has something to show; remove old files of the others.

    Raises UsageError where the study's folder cannot be written.
    """
    drawn = Drawn([], {})
    folder = results.output.figures
    try:
        if folder.is_symlink():  # of the folder's maker, who may be somebody else
            raise UsageError(f"{folder} is a link, through which would be written: remove it")
        folder.mkdir(exist_ok=True)
        for one in FIGURES:
            with rc():
                made = one.make(results, *([forecasts] if one.takes_forecasts else []))
                paths = [folder / f"{one.name}.png", folder / f"{one.name}.svg"]
                if made is not None:
                    save(made, *paths)
                    drawn.paths.extend(paths)
                    continue
            for path in paths:
                path.unlink(missing_ok=True)
            if one.missing:
                drawn.missing[one.name] = one.missing
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn
