"""The figure that compares all series at one size, as bars."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures import style
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted_ranks
from jobkit.spec.runspec import ONE_RANK

_MAX_BARS = 12  # under each other


def comparison_figure(results: Results) -> Figure | None:
    """Rate, peak memory and efficiency of each series at the largest size that most of them have.

    Series of one process (single, dp) have no such size: they stand beside it at their own.
    """
    rated = [s for s in results.sizes if s.throughput is not None and s.devices]
    groups: dict[tuple[str | None, str, int, int], list[Size]] = {}
    for size in [s for s in rated if s.strategy not in ONE_RANK] or rated:
        place = size.scaling, size.throughput_unit, size.devices or 0, size.nodes or 1
        groups.setdefault(place, []).append(size)
    if not groups:
        return None
    (scaling, rate, devices, nodes), shared = max(
        groups.items(), key=lambda group: (len(group[1]), group[0][2])
    )
    alone = [s for s in rated if s.strategy in ONE_RANK and s not in shared]
    sizes = [s for s in alone if (s.scaling, s.throughput_unit) == (scaling, rate)] + shared
    names, note = style.fastest(results, (s.series for s in sizes), _MAX_BARS)
    shown = [s for s in sizes if s.series in names]
    if len(shown) < 2:
        return None
    memory = "per GPU, allocated" if style.unit(results) == "GPUs" else "per process, resident"
    # Of each repeat; the first one is their median.
    panels: dict[str, list[Sequence[float]]] = {
        f"throughput ({rate})": [(s.throughput or 0, *s.rates) for s in shown],
        f"peak memory (MiB)\n{memory}": [
            (s.peak_memory_mib, *s.peaks_memory_mib) if s.peak_memory_mib else () for s in shown
        ],
        "parallel efficiency\nas in the table": [
            (s.efficiency,) if s.efficiency else () for s in shown
        ],
    }
    panels = {label: bars for label, bars in panels.items() if any(bars)}
    on = f" on {nodes} nodes" if nodes > 1 else ""
    title = f"{results.name}: side by side at {counted_ranks(devices, style.unit(results))}{on}"
    figure, axes = style.new_figure(len(panels), title + note, style.subtitle(results))
    figure.set_figheight(2.2 + 0.42 * len(shown))
    look = style.looks(s.series for s in results.sizes)
    for panel, (label, bars) in zip(axes, panels.items(), strict=True):
        percent = "efficiency" in label
        large = max(bar[0] for bar in bars if bar) >= 1000
        form = "{:.0%}" if percent else "{:,.0f}" if large else "{:.4g}"
        for y, (size, bar) in enumerate(zip(shown, bars, strict=True)):
            if bar:
                panel.barh(y, bar[0], 0.6, color=look[size.series]["color"], alpha=0.85)
                panel.hlines(y, min(bar), max(bar), color="black", lw=1.4)
                beside: Any = {"textcoords": "offset points", "va": "center"}
                panel.annotate(form.format(bar[0]), (max(bar), y), (4, 0), **beside)
        panel.set_xlim(0, 1.3 * panel.get_xlim()[1])  # room for the numbers
        panel.xaxis.set_major_locator(MaxNLocator(3))
        shares = PercentFormatter(1.0, decimals=0)
        panel.xaxis.set_major_formatter(shares if percent else style.PLAIN)
        # The first series is on top, also where it has no bar.
        panel.set_ylim(len(shown) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")
        panel.set_xlabel(label)
        panel.set_yticks(range(len(shown)), [""] * len(shown))
    labels = [
        style.short(s.series) + ("" if s.devices == devices else f"\nat {s.devices}") for s in shown
    ]
    axes[0].set_yticks(range(len(shown)), labels)
    return figure
