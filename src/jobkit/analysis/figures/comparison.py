"""The figure that compares all series at one size, as bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import (
    PLAIN,
    Look,
    fastest,
    looks,
    new_figure,
    on_gpu,
    subtitle,
    unit,
)
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted_ranks
from jobkit.spec.runspec import ONE_RANK

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
    """Rate, peak memory and efficiency of each series at the largest size that most of them have.

    Series of one process (single, dp) have no such size: they stand beside it at their own.
    """
    parallel = [s for s in results.sizes if s.strategy not in ONE_RANK]
    found = _shared_size(parallel or results.sizes)
    found = _of_one_process(results.sizes, found) + found if parallel else found
    if len(found) < _ENOUGH:
        return None
    names, note = fastest(results, (s.series for s in found), _MOST)
    shown = _with_efficiency([s for s in found if s.series in names])
    size = shown[-1]
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    where = f"{counted_ranks(size.devices or 0, unit(results))}{on}"
    title = f"{results.name}: side by side at {where}{note}"
    panels = [p for p in _panels(results, shown) if any(p.middle(s) is not None for s in shown)]
    figure, axes = new_figure(len(panels), title, subtitle(results))
    figure.set_figheight(2.2 + 0.42 * len(shown))
    look = looks(s.series for s in results.sizes)
    for i, (one, panel) in enumerate(zip(axes, panels, strict=True)):
        _bars(one, shown, panel, look)
        labels = [_label(s, size) if i == 0 else "" for s in shown]
        one.set_yticks(range(len(shown)), labels)
    return figure


def _label(one: Size, size: Size) -> str:
    """The series; where it has another size than the figure, that too."""
    same = one.devices == size.devices
    return one.series if same else f"{one.series}\nat {one.devices}"


def _shared_size(found: Sequence[Size]) -> list[Size]:
    """The sizes of the series that were measured on as many GPUs of as many nodes.

    The size that most series have; of several such sizes, the largest.
    """
    groups: dict[tuple[str | None, str, int, int], list[Size]] = {}
    for size in found:
        if size.throughput is not None and size.devices:
            key = (size.scaling, size.throughput_unit, size.devices, size.nodes or 1)
            groups.setdefault(key, []).append(size)
    return max(groups.values(), key=lambda g: (len(g), g[0].devices or 0), default=[])


def _of_one_process(sizes: Sequence[Size], beside: Sequence[Size]) -> list[Size]:
    """The measured series of one process whose rates have the unit and scaling of the others."""
    return [
        s
        for s in sizes
        if s.strategy in ONE_RANK
        and s.throughput is not None
        and beside
        and (s.scaling, s.throughput_unit) == (beside[0].scaling, beside[0].throughput_unit)
    ]


def _with_efficiency(shown: list[Size]) -> list[Size]:
    """The sizes with the efficiency relative to one process, where exactly one series is that.

    Else relative to the smallest size of its own series: none for that size itself.
    """
    singles = [s for s in shown if s.strategy == "single"]
    if len(singles) != 1:
        return [
            replace(s, efficiency=None if s.base_world_size == s.world_size else s.efficiency)
            for s in shown
        ]
    rate = singles[0].throughput or 1.0
    return [replace(s, efficiency=(s.throughput or 0) / rate / (s.devices or 1)) for s in shown]


def _panels(results: Results, shown: Sequence[Size]) -> list[_Panel]:
    each = "per GPU, allocated" if on_gpu(results) else "per process, resident"
    to_single = sum(s.strategy == "single" for s in shown) == 1
    base = "single" if to_single else "its smallest size"
    return [
        _Panel(
            f"throughput ({shown[0].throughput_unit})",
            lambda s: s.throughput,
            lambda s: s.rates,
            "{:,.0f}" if max(s.throughput or 0 for s in shown) >= 1000 else "{:.4g}",
        ),
        _Panel(
            f"peak memory (MiB)\n{each}",
            lambda s: s.peak_memory_mib,
            lambda s: s.peaks_memory_mib,
            "{:,.0f}",
        ),
        _Panel(
            f"parallel efficiency\nrelative to {base}",
            lambda s: s.efficiency,
            lambda s: (),
            "{:.0%}",
        ),
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
    percent = panel.form.endswith("%}")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0) if percent else PLAIN)
    axes.set_xlabel(panel.label)
    axes.set_ylim(len(shown) - 0.5, -0.5)  # the first series on top, also where it has no bar
    axes.grid(visible=False, axis="y")
