"""The figure that compares all series at one size, as bars."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted_ranks
from jobkit.spec.runspec import ONE_RANK

_MAX_BARS = 12  # under each other
_Values = Callable[[Size], Sequence[float]]  # of each repeat; the first one is their median


def comparison_figure(results: Results) -> Figure | None:
    """Rate, peak memory and efficiency of each series at the largest size that most of them have.

    Series of one process (single, dp) have no such size: they stand beside it at their own.
    """
    rated = [s for s in results.sizes if s.throughput is not None and s.devices]
    parallel = [s for s in rated if s.strategy not in ONE_RANK]
    shared = _shared_size(parallel or rated)
    if not shared:
        return None
    kind = shared[0].scaling, shared[0].throughput_unit
    alone = [s for s in rated if s.strategy in ONE_RANK and (s.scaling, s.throughput_unit) == kind]
    sizes = [*(alone if parallel else []), *shared]
    names, note = style.fastest(results, (s.series for s in sizes), _MAX_BARS)
    shown = [s for s in sizes if s.series in names]
    if len(shown) < 2:
        return None
    size = shown[-1]
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    where = f"{counted_ranks(size.devices or 0, style.unit(results))}{on}"
    memory = "per GPU, allocated" if style.on_gpu(results) else "per process, resident"
    wanted: dict[str, _Values] = {
        f"throughput ({size.throughput_unit})": lambda s: (s.throughput or 0, *s.rates),
        f"peak memory (MiB)\n{memory}": lambda s: (
            (s.peak_memory_mib, *s.peaks_memory_mib) if s.peak_memory_mib else ()
        ),
        "parallel efficiency\nas in the table": lambda s: (s.efficiency,) if s.efficiency else (),
    }
    panels = {label: of for label, of in wanted.items() if any(map(of, shown))}
    title = f"{results.name}: side by side at {where}{note}"
    figure, axes = style.new_figure(len(panels), title, style.subtitle(results))
    figure.set_figheight(2.2 + 0.42 * len(shown))
    for panel, (label, of) in zip(axes, panels.items(), strict=True):
        _bars(panel, {s.series: of(s) for s in shown}, results, percent="efficiency" in label)
        panel.set_xlabel(label)
        panel.set_yticks(range(len(shown)), [""] * len(shown))
    labels = [
        style.short(s.series) + ("" if s.devices == size.devices else f"\nat {s.devices}")
        for s in shown
    ]
    axes[0].set_yticks(range(len(shown)), labels)
    return figure


def _shared_size(sizes: Sequence[Size]) -> list[Size]:
    """The sizes of the series that were measured on as many GPUs of as many nodes.

    The size that most series have; of several such sizes, the largest.
    """
    groups: dict[tuple[str | None, str, int, int], list[Size]] = {}
    for size in sizes:
        key = (size.scaling, size.throughput_unit, size.devices or 0, size.nodes or 1)
        groups.setdefault(key, []).append(size)
    return max(groups.values(), key=lambda g: (len(g), g[0].devices or 0), default=[])


def _bars(axes: Axes, values: dict[str, Sequence[float]], results: Results, percent: bool) -> None:
    """A bar for each series with its number; the range of its repeats as a thin line."""
    look = style.looks(s.series for s in results.sizes)
    large = max((v[0] for v in values.values() if v), default=0) >= 1000
    for y, (series, known) in enumerate(values.items()):
        if not known:
            continue
        axes.barh(y, known[0], 0.6, color=look[series].colour, alpha=0.85)
        axes.hlines(y, min(known), max(known), color="black", lw=1.4)
        text = f"{known[0]:.0%}" if percent else f"{known[0]:,.0f}" if large else f"{known[0]:.4g}"
        place = max(known), y
        axes.annotate(text, place, (4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for the numbers
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0) if percent else style.PLAIN)
    axes.set_ylim(len(values) - 0.5, -0.5)  # the first series on top, also where it has no bar
    axes.grid(visible=False, axis="y")
