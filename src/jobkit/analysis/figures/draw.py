"""The figures of a study: a table of all, `draw`, which writes them, and learning over epochs.

    draw(results)       writes logs/STUDY/figures/*.png, *.svg and *.pdf

docs/contributing.md says how to add a figure.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobkit.analysis.collect.results import Results, make_own
from jobkit.analysis.figures import style
from jobkit.analysis.figures.by_size import comparison_figure, size_figure
from jobkit.analysis.figures.why import why_figure
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError

_MAX_LINES = 6  # with more, only the smallest and the largest size of a series are shown
_MAX_SERIES = 6
_PANELS = {"val_loss": "validation loss", "val_accuracy": "validation accuracy"}


def learning_figure(results: Results) -> Figure | None:
    """Two panels: a line for each series and size, the median of its repeats and their range.

    Colours and markers tell the series, dashes the size. Runs that are not ok are thin lines that
    end in a cross.
    """
    epochs = results.epochs.merge(results.runs[["run_id", "status"]], on="run_id")
    epochs = epochs.dropna(subset=["epoch"])
    panels = [name for name in _PANELS if epochs[name].notna().any()]
    if not panels:
        return None
    names, note = style.fastest(results, (s.series for s in results.sizes), _MAX_SERIES)
    shown = epochs[epochs["series"].isin(names)]
    if len(shown[["series", "world_size"]].drop_duplicates()) > _MAX_LINES:
        sizes, of_series = shown["world_size"], shown.groupby("series")["world_size"]
        ends = sizes.eq(of_series.transform("min")) | sizes.eq(of_series.transform("max"))
        shown, note = shown[ends.fillna(True)], f"{note}, smallest and largest size"
    title = f"{' and '.join(_PANELS[name] for name in panels)}{note}"
    figure, axes = style.new_figure(len(panels), title, results)
    look = style.looks(s.series for s in results.sizes)
    ranks = sorted(shown["world_size"].dropna().unique())
    groups: Any = shown.groupby(["series", "world_size"], dropna=False)
    for (series, n), group in groups:
        own = look[series] | {"ls": style.DASHES[0], "ms": 0.7 * look[series]["ms"]}
        if not pd.isna(n):
            own["ls"] = style.DASHES[ranks.index(n) % len(style.DASHES)]
            own["label"] += f", {counted(int(n), 'rank')}"
        for panel, name in zip(axes, panels, strict=True):
            _draw_line(panel, group.dropna(subset=[name]), name, own)
    for panel, name in zip(axes, panels, strict=True):
        panel.set_xlabel("epoch")
        panel.set_ylabel(_PANELS[name])
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if name == "val_accuracy":
            style.share_axis(panel)
    style.legend(figure, axes)
    return figure


def _draw_line(axes: Axes, epochs: pd.DataFrame, name: str, look: style.Look) -> None:
    """One line: median and range over the repeats that are ok; the others one by one."""
    ok = epochs[epochs["status"] == "ok"]
    if len(ok):
        by_epoch = ok.groupby("epoch")[name].agg(["median", "min", "max"]).astype(float)
        x = by_epoch.index.to_numpy(int) + 1  # people count epochs from 1
        # Markers of a long training would hide its line.
        axes.plot(x, by_epoch["median"], **look, markevery=1 + len(x) // 20)
        if ok["run_id"].nunique() > 1:
            own: Any = {"color": look["color"], "alpha": 0.12, "lw": 0, "zorder": 1}
            axes.fill_between(x, by_epoch["min"], by_epoch["max"], **own)
    for _, run in epochs[epochs["status"] != "ok"].groupby("run_id"):
        ordered = run.sort_values("epoch")
        x, y = ordered["epoch"].to_numpy(int) + 1, ordered[name].to_numpy(float)
        own = {"color": look["color"], "ls": look["ls"], "lw": 0.9, "alpha": 0.6, "zorder": 2}
        axes.plot(x, y, **own)
        cross = style.NOT_OK | {"color": look["color"], "label": style.FAILED}
        axes.plot(x[-1], y[-1], **cross, zorder=4)


class StudyFigure(NamedTuple):
    """One figure: its file's name, its caption, and the function that makes it."""

    name: str
    caption: str  # also the text for those who cannot see it
    make: Callable[[Results], Figure | None] | None = None  # None: of by_size.py


# In the order of the report.
FIGURES = (
    StudyFigure("time_per_epoch", "Time per epoch, per run or per amount of work, at each size."),
    StudyFigure("throughput", "Throughput over all ranks and per rank."),
    StudyFigure("speed_up", "Speed-up over the table's base; in grey the forecast (not measured)."),
    StudyFigure("efficiency", "Parallel efficiency: the share of the ideal speed-up reached."),
    StudyFigure(
        "why",
        "Shares of a step's time by cause: means over ranks; below, where one comes last beyond "
        "chance, the time of each rank. Waiting for later ranks is apart from communication; "
        "breakdown_communication_s has both. What helped against a cause: docs/own-program.md.",
        why_figure,
    ),
    StudyFigure(
        "comparison",
        "Rate, memory and efficiency at the largest size that most series share.",
        comparison_figure,
    ),
    StudyFigure("loss_and_accuracy", "Validation loss and accuracy over epochs.", learning_figure),
    StudyFigure("loss_and_accuracy_by_size", "Final loss and accuracy by size: median and range."),
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
        make_own(folder.parent)
        if folder.is_symlink():  # of the folder's maker, who may be somebody else
            raise UsageError(f"{folder} is a link, through which would be written: remove it")
        make_own(folder)
        for name, _, make in FIGURES:
            paths = [folder / f"{name}.{kind}" for kind in style.FORMATS]
            with rc_context(style.RC):
                figure = make(results) if make else size_figure(results, name, forecasts)
                if figure is not None:
                    style.save(figure, *paths)
                    drawn += paths
            for path in paths if figure is None else ():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn
