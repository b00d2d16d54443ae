"""The figures of a study: a table of all, and `draw`, which writes them.

    draw(results)       writes logs/STUDY/figures/*.png, *.svg and *.pdf

To add a figure of a value over sizes: an entry in BY_SIZE of by_size.py and one here. Any other: a
function that returns a Figure of results, or None if there is nothing to show, and an entry here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results, check_own
from jobkit.analysis.figures.by_size import comparison_figure, size_figure
from jobkit.analysis.figures.learning import learning_figure
from jobkit.analysis.figures.style import FORMATS, RC, save
from jobkit.analysis.figures.why import why_figure
from jobkit.analysis.findings.forecast import Forecast
from jobkit.errors import UsageError


class StudyFigure(NamedTuple):
    """One figure: its file's name, its caption, and the function that makes it."""

    name: str
    caption: str  # also the text for those who cannot see it
    make: Callable[[Results], Figure | None] | None = None  # None: of by_size.py


# In the order of the report.
FIGURES = (
    StudyFigure("time_per_epoch", "Time per epoch, per run or per amount of work, at each size."),
    StudyFigure("throughput", "Throughput over all ranks and per rank."),
    StudyFigure(
        "speed_up",
        "Speed-up over the base of the table and, in grey, the forecast, which is not measured.",
    ),
    StudyFigure(
        "efficiency", "Parallel efficiency: the share of the ideal speed-up that is reached."
    ),
    StudyFigure(
        "why",
        "Shares of a step's time by cause: means over ranks; below, where one comes last beyond "
        "chance, the time of each rank. Waiting for later ranks is apart from exposed "
        "communication; breakdown_communication_s of results.csv has both.",
        why_figure,
    ),
    StudyFigure(
        "comparison",
        "Rate, memory and efficiency at the largest size that most series share.",
        comparison_figure,
    ),
    StudyFigure("loss_and_accuracy", "Validation loss and accuracy over epochs.", learning_figure),
    StudyFigure(
        "loss_and_accuracy_by_size",
        "Final validation loss and accuracy at each size: median and range of the repeats.",
    ),
    StudyFigure("time_to_accuracy", "Training time to the same validation accuracy."),
    StudyFigure("peak_memory", "Peak memory at each size: maximum over ranks."),
)


def draw(results: Results, forecasts: Sequence[Forecast] = ()) -> list[Path]:
    """Make and save every figure that has something to show; return their paths.

    Old files of the others are removed. Raises UsageError where the folder cannot be written.
    """
    drawn: list[Path] = []
    folder = results.output.figures
    try:
        check_own(folder.parent)
        if folder.is_symlink():  # of the folder's maker, who may be somebody else
            raise UsageError(f"{folder} is a link, through which would be written: remove it")
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        for name, _, make in FIGURES:
            paths = [folder / f"{name}.{kind}" for kind in FORMATS]
            with rc_context(RC):
                figure = make(results) if make else size_figure(results, name, forecasts)
                if figure is not None:
                    save(figure, *paths)
                    drawn += paths
            for path in paths if figure is None else ():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn
