"""The style of the figures: readable in grey and by colour-blind readers, reproducible.

Axes, legends, the lines under a title, and the files.
"""

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jobkit.analysis.collect.results import Results
from jobkit.paths import write_whole

# To look at, for the report, for LaTeX; and the metadata that would differ each time.
_DATED = {
    "png": ["Software"],
    "svg": ["Date", "Creator"],
    "pdf": ["CreationDate", "Creator", "Producer"],
}
FORMATS = tuple(_DATED)
_WIDTH = 86  # characters: what the narrowest figure has room for under its title
_MAX_NAME = 44  # characters of a series in a legend
# Okabe and Ito's colours, those of the strongest contrast first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "p")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1)))
GREY = "#767676"
NOT_OK: Any = {"color": "#333333", "marker": "x", "ms": 7, "mew": 2.2, "ls": ""}
# The entries of a legend that are of no single series, by their labels.
IDEAL, INTERVAL = "ideal scaling from the smallest size", "95 % interval between runs"
RANGE, FAILED = "range of the repeats", "run not ok"
FORECAST, BAND = "forecast: not measured", "95 % prediction interval"
ON_MORE = "as many on more nodes"
_MARKS: dict[str, Artist] = {
    IDEAL: Line2D([], [], color=GREY, lw=0.9),
    **dict.fromkeys((INTERVAL, RANGE), Line2D([], [], color=GREY, marker="|", ms=11, ls="")),
    FAILED: Line2D([], [], **NOT_OK),
    FORECAST: Line2D([], [], color=GREY, lw=1.4, ls=(0, (4, 2))),
    ON_MORE: Line2D([], [], color=GREY, marker="o", mfc="none", ls=""),
    BAND: Patch(color=GREY, alpha=0.25, lw=0),
}
# Numbers that people read: no exponent, and thousands apart.
PLAIN = ticker.FuncFormatter(lambda v, _: f"{v:,.0f}" if 1000 <= abs(v) < 1e15 else f"{v:g}")
SHARE = ticker.PercentFormatter(1.0, decimals=0)
# The settings of matplotlib that hold while a figure is made and saved.
RC: Any = {
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
Look = dict[str, Any]  # of a line, as matplotlib calls its options


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name, in their order: each differs from those of its neighbours.

    A later line is drawn on an earlier one, which is thicker and so still seen.
    """
    return {
        name: {
            "label": short(name),
            "color": _COLOURS[i % 7],
            "marker": _MARKERS[i % 9],
            "ls": DASHES[i % 5],
            "ms": max(5.0, 10.0 - 1.5 * i),
            "lw": max(1.3, 2.6 - 0.4 * i),
            "zorder": 3 + 0.01 * i,
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def new_figure(
    panels: int, title: str, results: Results, rows: int = 1, more: Iterable[str] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, under a title, what all runs share, and more."""
    lines = [*(textwrap.fill(text, _WIDTH) for text in shared_settings(results)), *more]
    size = (6.4 if panels == 1 else 10.4, 4.6 if rows == 1 else 1.4 + 3.3 * rows)
    figure = Figure(figsize=size, dpi=150)
    axes = list(figure.subplots(rows, panels, squeeze=False).flat)
    figure.suptitle(f"{results.name}: {title}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    # A left title has room in the layout, right under the figure's own title.
    axes[0].set_title("\n".join(lines), loc="left", fontsize=9, color="#444444", pad=10)
    return figure, axes


def size_axis(axes: Axes, sizes: Iterable[int], unit: str) -> None:
    """World sizes on x at their real positions, by factors of two where all are such powers."""
    ticks = sorted(set(sizes))
    if len(ticks) > 1 and all(n & (n - 1) == 0 for n in ticks):
        axes.set_xscale("log", base=2)
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    else:
        margin = max(0.5, 0.08 * (ticks[-1] - ticks[0]))
        axes.set_xlim(ticks[0] - margin, ticks[-1] + margin)
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(unit)


def share_axis(axes: Axes) -> None:
    """Accuracies in percent, up to 100 %, where a marker is drawn whole."""
    axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    for line in axes.lines:
        line.set_clip_on(False)


def short(series: str) -> str:
    """The name of a series as a legend has room for it: what differs may be at its end."""
    half = (_MAX_NAME - 5) // 2
    return series if len(series) <= _MAX_NAME else f"{series[:half]} ... {series[-half:]}"


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend under the panels, each label once: the series, then what is of none."""
    known: dict[str, Artist] = {}
    for panel in axes:
        handles, texts = panel.get_legend_handles_labels()
        known |= dict(zip(texts, handles, strict=True))
    labels = sorted(known, key=lambda text: text in _MARKS)
    columns = max(1, int(14 * figure.get_figwidth()) // (max(map(len, labels)) + 8))
    more = max(0, -(-len(labels) // columns) - 2)  # rows
    figure.set_figheight(figure.get_figheight() + 0.2 * more)
    shown = [_MARKS.get(text, known[text]) for text in labels]
    figure.legend(shown, labels, loc="outside lower left", ncols=columns, fontsize=9)


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure's files, each whole; the same figure gives the same bytes."""
    # Laid out once. With a layout engine of its own, a figure is drawn twice for each file.
    ConstrainedLayoutEngine().execute(figure)
    for path in paths:
        content, kind = io.BytesIO(), path.suffix[1:]
        figure.savefig(content, format=kind, metadata=dict.fromkeys(_DATED[kind]))
        write_whole(path, content.getvalue())


def unit(results: Results) -> str:
    """What is counted: GPUs, or ranks where there is none."""
    return "GPUs" if (results.runs["device_type"] == "cuda").any() else "ranks"


def fastest(results: Results, names: Iterable[str], limit: int) -> tuple[list[str], str]:
    """The series with the highest rates, at most `limit`, and a note where some are left out."""
    series = list(dict.fromkeys(names))
    if len(series) <= limit:
        return series, ""
    rates = results.scaling.groupby("series")["throughput"].max().fillna(0)
    best = sorted(series, key=lambda name: -rates.get(name, 0))[:limit]
    return [n for n in series if n in best], f", the {limit} fastest of {len(series)} series"


def shared_settings(results: Results) -> list[str]:
    """What all runs share, in two lines at most: device, model, data, precision, scaling."""
    names = ("device", "model", "dataset", "precision", "scaling")
    values = {n: sorted(map(str, results.runs[n].dropna().unique())) for n in names}
    model, dataset, precision = (v[0] if len(v := values[n]) == 1 else "" for n in names[1:4])
    devices, dataset = values["device"], dataset.rstrip("/").rpartition("/")[2]
    what = [" and ".join(devices) if len(devices) <= 2 else f"{len(devices)} device types"]
    what += [" on ".join(filter(None, (model, dataset))), precision]
    kinds = " and ".join(f"{kind} scaling" for kind in values["scaling"])
    repeats = sorted({size.runs_ok for size in results.sizes} - {0})
    often = " to ".join(map(str, dict.fromkeys([*repeats[:1], *repeats[-1:]])))
    how = [kinds, f"{often} repeats" if repeats and repeats[-1] > 1 else ""]
    return [text for line in (what, how) if (text := " | ".join(filter(None, line)))]
