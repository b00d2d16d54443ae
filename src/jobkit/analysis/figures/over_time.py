"""Figures over time: learning over epochs, load and memory over the seconds of a run."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.tables.text import counted

_MAX_LINES = 6  # with more, only the smallest and the largest size of a series are shown
_PANELS = (("val_loss", "validation loss"), ("val_accuracy", "validation accuracy"))
# By the column of the load: its words, the column of the memory, its words.
_LOADS = {
    "gpu_busy": ("GPU busy (share of time)", "gpu_memory_mib", "GPU memory in use (GiB)"),
    "cpu_busy": ("load of all cores (share)", "memory_mib", "memory of the node in use (GiB)"),
}
_MAX_SERIES = 6  # of load and memory


def learning_figure(results: Results) -> Figure | None:
    """Two panels: a line for each series and size, the median of its repeats and their range.

    Runs that are not ok are thin lines that end in a cross.
    """
    epochs = results.epochs.merge(results.runs[["run_id", "status"]], on="run_id")
    epochs = epochs.dropna(subset=["epoch"])
    panels = [(name, text) for name, text in _PANELS if epochs[name].notna().any()]
    if not panels:
        return None
    shown, note = _few(epochs)
    title = f"{results.name}: {' and '.join(text for _, text in panels)}{note}"
    figure, axes = style.new_figure(len(panels), title, style.subtitle(results))
    look = style.looks(s.series for s in results.sizes)
    ranks = sorted(int(n) for n in shown["world_size"].dropna().unique())
    for panel, (name, text) in zip(axes, panels, strict=True):
        for _, group in shown.groupby(["series", "world_size"], dropna=False):
            first = group.iloc[0]
            size = first["world_size"]
            place = 0 if pd.isna(size) else ranks.index(int(size))
            _draw(
                panel, group, name, look[first["series"]], style.DASHES[place % len(style.DASHES)]
            )
        panel.set_xlabel("epoch")
        panel.set_ylabel(text)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if panels[-1][0] == "val_accuracy":
        axes[-1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes[-1].set_ylim(top=min(1.0, axes[-1].get_ylim()[1]))
        for line in axes[-1].lines:  # a marker at 100 % is drawn whole
            line.set_clip_on(False)
    # Colours and markers tell the series, dashes the size.
    of_series = {k: v._replace(dashes="-") for k, v in look.items() if k in set(shown["series"])}
    handles = style.series_entries(of_series, 5)
    handles += [style.entry(counted(n, "rank"), ls=_dashes(i)) for i, n in enumerate(ranks)]
    if (shown["status"] != "ok").any():
        handles.append(style.entry("run not ok", marker="x", ms=7, mew=2.2, lw=0.9))
    style.legend_below(figure, handles)
    return figure


def _dashes(place: int) -> Any:
    return style.DASHES[place % len(style.DASHES)]


def _few(epochs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The epochs of few enough lines to tell apart, and a note on what is left out."""
    if len(epochs[["series", "world_size"]].drop_duplicates()) <= _MAX_LINES:
        return epochs, ""
    of_series = epochs.groupby("series")["world_size"]
    ends = epochs["world_size"] == of_series.transform("min")
    ends |= epochs["world_size"] == of_series.transform("max")
    shown = epochs[ends.fillna(True)]
    return shown, ", smallest and largest size" if len(shown) < len(epochs) else ""


def _draw(axes: Axes, group: pd.DataFrame, name: str, look: style.Look, dashes: object) -> None:
    """One line: median and range over the repeats that are ok; the others one by one."""
    known = group.dropna(subset=[name])
    ok = known[known["status"] == "ok"]
    if len(ok):
        by_epoch = ok.groupby("epoch")[name].agg(["median", "min", "max"]).astype(float)
        x = [int(e) + 1 for e in by_epoch.index]  # people count epochs from 1
        step = 1 + len(x) // 20  # markers of a long training would hide its line
        style.plot_line(
            axes, x, by_epoch["median"], look, ls=dashes, ms=0.7 * look.size, markevery=step
        )
        if ok["run_id"].nunique() > 1:
            low, high = by_epoch["min"], by_epoch["max"]
            axes.fill_between(x, low, high, color=look.colour, alpha=0.12, lw=0, zorder=1)
    for _, run in known[known["status"] != "ok"].groupby("run_id"):
        ordered = run.sort_values("epoch")
        x, y = [int(e) + 1 for e in ordered["epoch"]], ordered[name].astype(float).tolist()
        axes.plot(x, y, color=look.colour, ls=dashes, lw=0.9, alpha=0.6, zorder=2)
        axes.plot(x[-1], y[-1], "x", color=look.colour, ms=7, mew=2.2, zorder=4)


def load_figure(results: Results) -> Figure | None:
    """Load and memory over time of one run of each series: the first ok one at its largest size.

    Of the GPUs if they were sampled, else of the nodes' processors; a line for each rank.
    """
    runs = results.runs[results.runs["status"] == "ok"].dropna(subset=["world_size"])
    for name in _LOADS if len(results.samples) else ():
        known = results.samples[results.samples["run_id"].isin(runs["run_id"])]
        known = known.dropna(subset=[name, "at_s"])
        if len(known):
            break
    else:
        return None
    label, memory_name, memory_label = _LOADS[name]
    sampled = runs[runs["run_id"].isin(known["run_id"])].sort_values(
        ["world_size", "repeat"], ascending=[False, True], kind="stable"
    )
    shown, note = style.fastest(results, sampled["series"], _MAX_SERIES)
    words = f"one run of each series at its largest size, a line per sampling rank{note}"
    title = f"{results.name}: load and memory over time"
    figure, (load, memory) = style.new_figure(2, title, style.subtitle(results, shown=words))
    look = style.looks(s.series for s in results.sizes)
    for series in shown:
        samples = known[known["run_id"] == sampled[sampled["series"] == series]["run_id"].iloc[0]]
        _draw_run(load, samples, name, look[series])
        _draw_run(memory, samples.dropna(subset=[memory_name]), memory_name, look[series], 1024)
    load.set_ylim(0, 1.05)
    load.set_ylabel(label)
    memory.set_ylim(bottom=0)
    memory.set_ylabel(memory_label)
    for axes in (load, memory):
        axes.set_xlabel("time since the first sample (s)")
    style.legend(figure, [load, memory], {series: look[series] for series in shown})
    return figure


def _draw_run(
    axes: Axes, samples: pd.DataFrame, name: str, look: style.Look, part: float = 1
) -> None:
    """A line for each rank; part: of the values' unit, by which they are divided."""
    for _, of_rank in samples.groupby(["attempt", "rank"]):
        ordered = of_rank.sort_values("at_s")
        x, y = (ordered[k].astype(float).to_numpy() for k in ("at_s", name))
        axes.plot(x, y / part, color=look.colour, ls=look.dashes, lw=1.2, zorder=look.layer)
