"""The style of the figures: readable in grey and by colour-blind readers, reproducible.

Axes, legends, the lines under a title, and the files.
"""

import math
import secrets
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.conditions import rate_sources

FORMATS = ("png", "svg", "pdf")  # to look at, for the report, for LaTeX
IDEAL = "ideal scaling from the smallest size"
_WIDTH = 86  # characters: what the narrowest figure has room for under its title
_MAX_NAME = 44  # characters of a series in a legend
# Okabe and Ito's colours, those of the strongest contrast first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "p")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1)))
GREY = "#767676"
# Numbers that people read: no exponent, and thousands apart.
PLAIN = FuncFormatter(lambda v, _: f"{v:,.0f}" if abs(v) >= 1000 else f"{v:g}")
_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in the name of a study or device is plain text
    "svg.hashsalt": "jobkit",  # the same ids in the SVG every time
}


class Look(NamedTuple):
    """The look of one line: each differs from those of its neighbours.

    A later line is drawn on an earlier one, which is thicker and so still seen.
    """

    colour: str
    marker: str
    dashes: Any
    size: float  # of the marker, in points
    width: float  # of the line, in points
    layer: float


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name, in their order."""
    return {
        name: Look(
            *(_COLOURS[i % 7], _MARKERS[i % 9], DASHES[i % 5]),
            *(max(5.0, 10.0 - 1.5 * i), max(1.3, 2.6 - 0.4 * i), 3 + 0.01 * i),
        )
        for i, name in enumerate(dict.fromkeys(names))
    }


def rc() -> Any:
    """The settings of matplotlib that hold while a figure is made and saved."""
    return mpl.rc_context(_RC)


def new_figure(panels: int, title: str, subtitle: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side in each row, under a title and subtitle.

    Returns its panels row by row.
    """
    size = (6.4 if panels == 1 else 10.4, 4.6 if rows == 1 else 1.4 + 3.3 * rows)
    figure = Figure(figsize=size, dpi=150)
    axes = list(figure.subplots(rows, panels, squeeze=False).flat)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    # A left title has room in the layout, right under the figure's own title.
    axes[0].set_title(subtitle, loc="left", fontsize=9, color="#444444", pad=10)
    return figure, axes


def size_axis(axes: Axes, sizes: Sequence[int], unit: str) -> None:
    """World sizes on x at their real positions, by factors of two where all are such powers."""
    ticks = sorted(set(sizes))
    if len(ticks) > 1 and all(n & (n - 1) == 0 for n in ticks):
        axes.set_xscale("log", base=2)
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    else:
        margin = max(0.5, 0.08 * (ticks[-1] - ticks[0]))
        axes.set_xlim(ticks[0] - margin, ticks[-1] + margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel(unit)


def log_time_axis(axes: Axes) -> None:
    """Seconds on a log axis, with plain numbers on it however small its range is.

    The range is at least a factor of two, so that noise does not fill the page.
    """
    low, high = axes.get_ylim()
    if high / low < 2:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(2), middle * math.sqrt(2))
    log_axis(axes.yaxis)


def log_axis(axis: Axis) -> None:
    """A log axis with plain numbers: the more powers of ten, the fewer of each."""
    low, high = axis.get_view_interval()
    if high / low < 4:
        axis.set_major_locator(AutoLocator())
    else:
        steps: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6, 8)
        if high / low > 30:
            steps = (1, 2, 5) if high / low < 2000 else (1,)
        axis.set_major_locator(LogLocator(base=10, subs=steps, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(PLAIN)


def log_ratio_axis(axes: Axes) -> None:
    """Ratios on a log axis by factors of two, as the sizes are: the ideal is a straight line."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def series_label(what: str, series: str) -> str:
    """What an axis shows and, under it, of which series, for panels that stand side by side."""
    return f"{what}\n{textwrap.fill(series, 36)}"


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend under the panels, in as many columns as fit; the figure grows with its rows."""
    longest = max(len(str(h.get_label())) for h in handles) + 8
    columns = max(1, min(len(handles), int(14 * figure.get_figwidth()) // longest))
    rows = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, rows - 2))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=9)


def short(series: str) -> str:
    """The name of a series as a legend has room for it."""
    return series if len(series) <= _MAX_NAME else f"{series[: _MAX_NAME - 3]}..."


def plot_line(axes: Axes, x: ArrayLike, y: ArrayLike, look: Look, **others: Any) -> None:
    """Draw a line in the look of its series; others: what differs, as matplotlib calls it."""
    options = {"color": look.colour, "marker": look.marker, "ms": look.size, "ls": look.dashes}
    options |= {"lw": look.width, "zorder": look.layer}
    axes.plot(np.asarray(x), np.asarray(y), **(options | others))


def ideal_line(axes: Axes, x: ArrayLike, y: ArrayLike) -> None:
    """Draw ideal scaling as a thin grey line."""
    axes.plot(np.asarray(x), np.asarray(y), color=GREY, lw=0.9, zorder=1.5, label=IDEAL)


def entry(label: str, colour: str = GREY, **options: Any) -> Line2D:
    """An entry of a legend; options: as matplotlib calls them."""
    return Line2D([], [], color=colour, label=label, **options)


def series_entries(look: dict[str, Look], size: float) -> list[Artist]:
    """The entries of the series, with markers of this size."""
    return [
        entry(short(name), k.colour, marker=k.marker, ms=size, ls=k.dashes)
        for name, k in look.items()
    ]


def legend(
    figure: Figure, axes: Iterable[Axes], look: dict[str, Look], extra: Sequence[Artist] = ()
) -> None:
    """Add one legend under the panels: the series, then the ideal line, the cross and others."""
    lines = [line for panel in axes for line in panel.lines]
    handles = series_entries(look, 7)
    if any(line.get_label() == IDEAL for line in lines):
        handles.append(entry(IDEAL, lw=0.9))
    if any(line.get_marker() == "x" for line in lines):
        handles.append(entry("run not ok", marker="x", ms=7, mew=2.2, ls=""))
    legend_below(figure, [*handles, *extra])


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure's files, each whole; the same figure gives the same bytes."""
    # Laid out once. With a layout engine of its own, a figure is drawn twice for each file.
    ConstrainedLayoutEngine().execute(figure)
    metadata: dict[str, Any] = {
        ".png": {"Software": None},
        ".svg": {"Date": None, "Creator": None},
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    for path in paths:
        # Of a name that nobody can put a link at beforehand.
        beside = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
        try:
            figure.savefig(beside, metadata=metadata[path.suffix])
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def on_gpu(results: Results) -> bool:
    return bool((results.runs["device_type"] == "cuda").any())


def unit(results: Results) -> str:
    return "GPUs" if on_gpu(results) else "processes (ranks)"


def fastest(results: Results, names: Iterable[str], limit: int) -> tuple[list[str], str]:
    """The series with the highest rates, at most `limit`, and a note where some are left out."""
    series = list(dict.fromkeys(names))
    if len(series) <= limit:
        return series, ""
    rates = results.scaling.groupby("series")["throughput"].max().fillna(0)
    best = sorted(series, key=lambda name: -float(rates.get(name, 0)))[:limit]
    note = f", the {limit} fastest of {len(series)} series"
    return [name for name in series if name in best], note


def subtitle(results: Results, spread: str = "median and range", shown: str = "") -> str:
    """What all runs share: device, model, data, precision, batch.

    spread: what is drawn of repeats. shown: what is drawn in place of it.
    """
    texts = shared_settings(results, spread, shown)
    return "\n".join(textwrap.fill(text, _WIDTH) for text in texts)


def shared_settings(results: Results, spread: str, shown: str = "") -> list[str]:
    """The same as at most two lines of any length."""
    runs = results.runs
    repeats = int(runs["repeat"].max()) + 1 if runs["repeat"].notna().any() else 1
    repeated = f"{spread} of {repeats} repeats" if repeats > 1 else ""
    names = list(runs["device"].dropna().unique())
    devices = " and ".join(names) if len(names) <= 2 else f"{len(names)} device types"
    lines = ([devices, *_settings(runs)], [_batch(runs), shown or repeated])
    texts = (" | ".join(part for part in line if part) for line in lines)
    return [text for text in texts if text]


def _shared(runs: pd.DataFrame, name: str) -> Any:
    """The value that all runs share; empty where they differ or it is not known."""
    values = runs[name].dropna().unique()
    return values[0] if len(values) == 1 else ""


def _settings(runs: pd.DataFrame) -> list[str]:
    measured = runs["throughput_source"].notna().any()
    # Of a command nothing is known but its parameters, of which one may be called model.
    if runs["model"].isna().all() or (measured and runs["epochs_planned"].isna().all()):
        return [" and ".join(rate_sources(runs))]
    dataset, samples = str(_shared(runs, "dataset")), _shared(runs, "train_samples")
    if dataset.startswith(("folder:", "idx:")):
        dataset = dataset.partition(":")[2].rstrip("/").rsplit("/", 1)[-1]
    on = f"{_shared(runs, 'model') or 'models'} on {dataset or 'several datasets'}"
    return [f"{on}, {samples:,} images" if samples else on, _shared(runs, "precision")]


def _batch(runs: pd.DataFrame) -> str:
    """The batch that is constant in each kind of scaling."""
    texts = []
    for scaling, name, word in (
        ("strong", "global_batch_size", "global batch"),
        ("weak", "batch_size_per_rank", "batch per rank"),
    ):
        of_kind = runs[runs["scaling"] == scaling]
        batch = _shared(of_kind, name)
        text = f"{scaling} scaling" + (f", {word} {batch:,}" if batch else "")
        texts += [text] * bool(len(of_kind))
    return " and ".join(texts)
