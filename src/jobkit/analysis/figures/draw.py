"""The figures of a study: a table of all, and `draw`, which writes them.

    draw(results)       writes logs/STUDY/figures/*.png, *.svg and *.pdf

To add a figure of a value over sizes: an entry in BY_SIZE of by_size.py and one here. Any other: a
function that returns a Figure of results, or None if there is nothing to show, and an entry here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results, check_own
from jobkit.analysis.figures.by_size import size_figure
from jobkit.analysis.figures.comparison import comparison_figure
from jobkit.analysis.figures.forecast import forecast_figure
from jobkit.analysis.figures.over_time import learning_figure, load_figure
from jobkit.analysis.figures.style import FORMATS, rc, save
from jobkit.analysis.figures.why import why_figure
from jobkit.analysis.findings.forecast import Forecast
from jobkit.errors import UsageError

_NOT_MEASURED = "no successful run has it"
_ONE_SIZE = "fewer than two measured sizes"


@dataclass(frozen=True)
class StudyFigure:
    """One figure: its file's name, its caption, and the function that makes it."""

    name: str
    caption: str  # also the text for those who cannot see it
    make: Callable[..., Figure | None] | None = None  # None: a value over sizes, of by_size.py
    missing: str = ""  # of a figure that every study should have: why it has none
    takes_forecasts: bool = False  # as the second argument of make


# In the order of the report.
FIGURES = (
    StudyFigure(
        "time_per_epoch",
        "Time per epoch, per run or per amount of work, at each size. Grey line: ideal scaling.",
        missing=_NOT_MEASURED,
    ),
    StudyFigure("throughput", "Throughput over all ranks and per rank. Grey line: ideal scaling."),
    StudyFigure("speed_up", "Speed-up. Grey line: ideal scaling.", missing=_ONE_SIZE),
    StudyFigure(
        "efficiency",
        "Parallel efficiency: the share of the ideal speed-up that is reached.",
        missing=_ONE_SIZE,
    ),
    StudyFigure(
        "forecast",
        "Measured speed-up and, beyond it, the prediction, which is not measured.",
        forecast_figure,
        takes_forecasts=True,
    ),
    StudyFigure(
        "why",
        "Time of a step by cause: means over ranks; below as shares, or of each rank where one "
        "comes last beyond chance. Waiting for later ranks is apart from exposed communication; "
        "breakdown_communication_s of results.csv has both.",
        why_figure,
    ),
    StudyFigure(
        "step_times",
        "Time of single steps without the warm-up. Where percentiles lie far above the median, "
        "some steps wait for a slow rank, for data or for the machine.",
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
    ),
    StudyFigure(
        "time_to_accuracy",
        "Training time to the same validation accuracy. Grey line: ideal scaling.",
    ),
    StudyFigure(
        "peak_memory", "Peak memory at each size: maximum over ranks.", missing=_NOT_MEASURED
    ),
    StudyFigure(
        "load",
        "Load and memory over the time of a run: of the GPUs where they were sampled, else of the "
        "nodes. Load below 1 is idle.",
        load_figure,
    ),
    StudyFigure("energy", "Energy per unit of work at each size, by counters of the machine."),
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
        check_own(folder.parent)
        if folder.is_symlink():  # of the folder's maker, who may be somebody else
            raise UsageError(f"{folder} is a link, through which would be written: remove it")
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        for item in FIGURES:
            paths = [folder / f"{item.name}.{kind}" for kind in FORMATS]
            with rc():
                if item.make is None:
                    figure = size_figure(results, item.name)
                else:
                    figure = item.make(results, *([forecasts] if item.takes_forecasts else []))
                if figure is not None:
                    save(figure, *paths)
                    drawn.paths.extend(paths)
                    continue
            for path in paths:
                path.unlink(missing_ok=True)
            if item.missing:
                drawn.missing[item.name] = item.missing
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn
