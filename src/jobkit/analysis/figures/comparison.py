"""The figure that compares all series at one size, as bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import fastest, on_gpu, unit
from jobkit.analysis.figures.style import PLAIN, Look, looks, new_figure
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted_ranks

_MOST = 12  # bars under each other
_ENOUGH = 2  # series at the size


@dataclass(frozen=True)
class _Panel:
    """What a panel shows: its words, the median and the repeats of a size, and their form."""

    label: str
    middle: Callable[[Size], float | None]
    repeats: Callable[[Size], tuple[float, ...]]
    form: str


def comparison_figure(results: Results) -> Figure | None:
    """Time per epoch, peak memory and accuracy of each series at the size that most of them have.

    Of several such sizes, the largest.
    """
    found = _shared_size(results.sizes)
    if len(found) < _ENOUGH:
        return None
    names, note = fastest(results, (s.series for s in found), _MOST)
    shown = [s for s in found if s.series in names]
    size = shown[0]
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    where = f"{counted_ranks(size.devices or 0, unit(results))}{on}"
    title = f"{results.name}: side by side at {where}{note}"
    panels = [
        p
        for p in _panels(on_gpu(results), size.time_of)
        if any(p.middle(s) is not None for s in shown)
    ]
    figure, axes = new_figure(len(panels), title, subtitle(results))
    figure.set_figheight(2.2 + 0.42 * len(shown))
    look = looks(s.series for s in results.sizes)
    for i, (one, panel) in enumerate(zip(axes, panels, strict=True)):
        _bars(one, shown, panel, look)
        one.set_yticks(range(len(shown)), [s.series if i == 0 else "" for s in shown])
    return figure


def _shared_size(found: Sequence[Size]) -> list[Size]:
    """The sizes of the series that were measured on as many GPUs of as many nodes."""
    groups: dict[tuple[str | None, str, int, int], list[Size]] = {}
    for size in found:
        if size.throughput is not None and size.devices:
            key = (size.scaling, size.throughput_unit, size.devices, size.nodes or 1)
            groups.setdefault(key, []).append(size)
    return max(groups.values(), key=lambda g: (len(g), g[0].devices or 0), default=[])


def _panels(gpus: bool, time_of: str) -> list[_Panel]:
    each = "per GPU, allocated" if gpus else "per process, resident"
    return [
        _Panel(
            f"time per {time_of} (s)",
            lambda s: s.time_s,
            lambda s: s.times_s,
            "{:.3g}",
        ),
        _Panel(
            f"peak memory (MiB)\n{each}",
            lambda s: s.peak_memory_mib,
            lambda s: s.peaks_memory_mib,
            "{:,.0f}",
        ),
        _Panel("validation accuracy", lambda s: s.val_accuracy, lambda s: (), "{:.1%}"),
    ]


def _bars(axes: Axes, shown: list[Size], panel: _Panel, look: dict[str, Look]) -> None:
    """A bar for each series with its number; the range of its repeats as a thin line."""
    for y, size in enumerate(shown):
        value = panel.middle(size)
        if value is None:
            continue
        repeats = panel.repeats(size) or (value,)
        axes.barh(y, value, 0.6, color=look[size.series].colour, alpha=0.85)
        axes.hlines(y, min(repeats), max(repeats), color="black", lw=1.4)
        end = max(value, *repeats)
        axes.annotate(
            panel.form.format(value), (end, y), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for the numbers
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(PLAIN)
    if panel.form.endswith("%}"):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(0, max(1.0, axes.get_xlim()[1]))
    axes.set_xlabel(panel.label)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
