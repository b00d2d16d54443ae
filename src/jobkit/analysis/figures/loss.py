"""The figure of validation loss at every size, against epochs and against time."""

from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import fastest, unit
from jobkit.analysis.figures.style import legend_below, log_axis, new_figure, series_label
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.tables.text import counted_ranks

_MOST = 3  # series side by side
_MARKERS = "osD^vP*X"


def loss_figure(results: Results) -> Figure | None:
    """Validation loss of every size: a column for each series; epochs above, training time below.

    Sizes whose lines coincide above learn equally much per epoch: no effect of the batch size.
    Medians of the runs that are ok.
    """
    epochs = _timed(results)
    sizes_of = epochs.groupby("series")["world_size"].nunique()
    several = [name for name in epochs["series"].unique() if sizes_of[name] > 1]
    if not several:
        return None
    names, note = fastest(results, several, _MOST)
    title = f"{results.name}: validation loss at every size{note}"
    figure, axes = new_figure(len(names), title, subtitle(results, "median"), rows=2)
    shown = epochs[epochs["series"].isin(names)]
    ranks = sorted(int(n) for n in shown["world_size"].unique())
    for column, name in enumerate(names):
        above, below = axes[column], axes[len(names) + column]
        for n, own in shown[shown["series"] == name].groupby("world_size"):
            _draw(above, below, own, ranks.index(int(str(n))), len(ranks))
        above.set_xlabel(series_label("epoch", name))
        above.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        below.set_xscale("log")
        below.set_xlabel(series_label("training time (s), log scale", name))
        log_axis(below.xaxis, crowded=True)
    _same_height(axes)
    for first in (axes[0], axes[len(names)]):
        first.set_ylabel("validation loss")
    legend_below(figure, [_handle(results, ranks, n) for n in ranks])
    return figure


def _timed(results: Results) -> pd.DataFrame:
    """The epochs of the runs that are ok, with the time to their end: training alone."""
    ok = results.runs[results.runs["status"] == "ok"][["run_id", "train_samples"]]
    wanted = ["epoch", "val_loss", "world_size", "images_per_s", "train_samples"]
    epochs = results.epochs.merge(ok, on="run_id").dropna(subset=wanted)
    epochs = epochs[epochs["images_per_s"] > 0].sort_values(["run_id", "epoch"])
    seconds = epochs["train_samples"] / epochs["images_per_s"]
    return epochs.assign(time_s=seconds.groupby(epochs["run_id"]).cumsum())


def _draw(above: Axes, below: Axes, own: pd.DataFrame, place: int, count: int) -> None:
    """One size: the median of its repeats over epochs and over the median time of each."""
    middle = own.groupby("epoch")[["val_loss", "time_s"]].median().astype(float)
    look = _look(place, count)
    above.plot([int(e) + 1 for e in middle.index], middle["val_loss"], lw=1.5, **look)
    below.plot(middle["time_s"], middle["val_loss"], lw=1.5, **look)


def _look(place: int, count: int) -> dict[str, Any]:
    """Dark for few ranks, light for many: the sizes have an order, which colours show."""
    colour = to_hex(colormaps["viridis"](0.9 * place / max(1, count - 1)))
    return {"color": colour, "marker": _MARKERS[place % len(_MARKERS)], "ms": 4}


def _handle(results: Results, all_ranks: list[int], ranks: int) -> Line2D:
    """A size in the legend, with its batch where this is not the same at all sizes."""
    runs = results.runs[results.runs["world_size"] == ranks]
    batches = sorted(int(b) for b in runs["global_batch_size"].dropna().unique())
    several = results.runs["global_batch_size"].nunique() > 1
    text = f" (global batch {' and '.join(f'{b:,}' for b in batches)})" if several else ""
    place = all_ranks.index(ranks)
    label = f"{counted_ranks(ranks, unit(results))}{text}"
    return Line2D([], [], label=label, **_look(place, len(all_ranks)))


def _same_height(axes: list[Axes]) -> None:
    """One range of the loss in all panels."""
    low, high = min(a.get_ylim()[0] for a in axes), max(a.get_ylim()[1] for a in axes)
    for one in axes:
        one.set_ylim(low, high)
