"""The figure of learning over epochs."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.tables.text import counted

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
    title = f"{results.name}: {' and '.join(_PANELS[name] for name in panels)}{note}"
    figure, axes = style.new_figure(len(panels), title, style.subtitle(results))
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
