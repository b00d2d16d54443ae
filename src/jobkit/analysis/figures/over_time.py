"""Figures over time: learning over epochs, load and memory over the seconds of a run."""

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
# By the column of the load: its words, the column of the memory, its words.
_LOADS = {
    "gpu_busy": ("GPU busy (share of time)", "gpu_memory_mib", "GPU memory in use (GiB)"),
    "cpu_busy": ("load of all cores (share)", "memory_mib", "memory of the node in use (GiB)"),
}


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


def load_figure(results: Results) -> Figure | None:
    """Load and memory over time of one run of each series: the first ok one at its largest size.

    Of the GPUs if they were sampled, else of the nodes' processors; a line for each rank.
    """
    table = results.samples
    names = [name for name in _LOADS if len(table) and table[name].notna().any()]
    if not names:
        return None
    load, (load_label, memory, memory_label) = names[0], _LOADS[names[0]]
    known = {str(k): of_run for k, of_run in table.dropna(subset=[load, "at_s"]).groupby("run_id")}
    # Small sizes come first, and the last one of a series stays.
    first = {s.series: r for s in results.sizes for r in reversed(s.ok_runs) if r in known}
    shown, note = style.fastest(results, first, _MAX_SERIES)
    if not shown:
        return None
    words = f"one run of each series at its largest size, a line per sampling rank{note}"
    title = f"{results.name}: load and memory over time"
    figure, axes = style.new_figure(2, title, f"{style.subtitle(results)}\n{words}")
    look = style.looks(s.series for s in results.sizes)
    panels = ((load, load_label, 1), (memory, memory_label, 1024))
    for panel, (name, label, share) in zip(axes, panels, strict=True):
        for series in shown:
            own: Any = look[series] | {"marker": "", "lw": 1.2}
            samples = known[first[series]].dropna(subset=[name])
            for _, of_rank in samples.sort_values("at_s").groupby(["attempt", "rank"]):
                x = of_rank["at_s"].to_numpy(float)
                panel.plot(x, of_rank[name].to_numpy(float) / share, **own)
                others = of_rank.dropna(subset=["other_load"])
                if name == "cpu_busy" and len(others):
                    other: Any = own | {"ls": ":", "lw": 0.9, "label": style.OTHERS}
                    panel.plot(*others[["at_s", "other_load"]].to_numpy(float).T, **other)
        panel.set_ylim(0, 1.05 if name == load else None)
        panel.set_ylabel(label)
        panel.set_xlabel("time since the first sample (s)")
    style.legend(figure, axes)
    return figure
