"""The figures of a study: time per epoch, learning curves, peak memory.

    draw(results)       writes logs/STUDY/figures/*.png and *.svg

Each *_figure function makes one matplotlib Figure from results and has no other effect.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jobkit.analysis.collect import Results
from jobkit.analysis.curves import learning_figure
from jobkit.analysis.sizes import Size, sizes
from jobkit.analysis.style import (
    GREY,
    Look,
    log_time_axis,
    looks,
    new_figure,
    rc,
    size_axis,
)
from jobkit.analysis.subtitle import subtitle
from jobkit.errors import UsageError

_IDEAL = "ideal, from the smallest size"
_MIB_A_GIB = 1024
_MARK_STEP = 0.055  # of the height of the axes: room for one mark of a run that is not ok


@dataclass(frozen=True)
class Drawn:
    """The files that were written, and the names of figures that would show nothing."""

    paths: list[Path]
    skipped: list[str]


def draw(results: Results) -> Drawn:
    """Make and save every figure that has something to show; remove the others' old files.

    Raises UsageError where the study's folder cannot be written.
    """
    makers: dict[str, Callable[[Results], Figure | None]] = {
        "time_per_epoch": time_figure,
        "loss_and_accuracy": learning_figure,
        "peak_memory": memory_figure,
    }
    drawn = Drawn([], [])
    folder = results.paths.figures
    try:
        folder.mkdir(exist_ok=True)
        for name, make in makers.items():
            with rc():
                figure = make(results)
                for path in (folder / f"{name}.png", folder / f"{name}.svg"):
                    if figure is None:
                        path.unlink(missing_ok=True)
                    else:
                        _save(figure, path)
                        drawn.paths.append(path)
            if figure is None:
                drawn.skipped.append(name)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None
    return drawn


def time_figure(results: Results) -> Figure | None:
    """Time per epoch over world sizes, both at their real positions, with the ideal lines.

    Strong scaling: the time of an epoch; ideal is base time x base size / size. Weak scaling: each
    rank's share of an epoch is held at what it is at the smallest size, so that ideal is flat.
    """
    found = [s for s in sizes(results.runs) if s.world_size]
    panels = [k for k in ("strong", "weak") if any(_times(s) for s in found if s.scaling == k)]
    if not panels:
        return None
    title = f"{results.folder.resolve().name}: time per epoch"
    figure, axes = new_figure(len(panels), title, subtitle(results))
    look = looks(s.series for s in found)
    for one, scaling in zip(axes, panels, strict=True):
        own = [s for s in found if s.scaling == scaling]
        one.set_yscale("log")
        for line in _lines(own):
            _draw_line(one, line, look[line[0].series], _times)
            _draw_ideal(one, line)
        _mark_not_ok(one, own, look)
        log_time_axis(one)
        size_axis(one, [s.world_size or 0 for s in own], _unit(results))
        one.set_ylabel(_time_label(scaling, own))
    _legend(figure, axes, look)
    return figure


def memory_figure(results: Results) -> Figure | None:
    """Peak memory of the fullest GPU (on the CPU: process) over world sizes, from zero."""
    found = [s for s in sizes(results.runs) if s.world_size]
    if not any(s.peaks_memory_mib for s in found):
        return None
    on_gpu = _on_gpu(results)
    what = "peak memory per GPU" if on_gpu else "peak memory per process"
    figure, (axes,) = new_figure(1, f"{results.folder.resolve().name}: {what}", subtitle(results))
    look = looks(s.series for s in found)
    large = max(m for s in found for m in s.peaks_memory_mib) >= 10 * _MIB_A_GIB
    factor = 1 / _MIB_A_GIB if large else 1.0

    def peaks(size: Size) -> tuple[float, ...]:
        return tuple(m * factor for m in size.peaks_memory_mib)

    for line in _lines(found):
        _draw_line(axes, line, look[line[0].series], peaks)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    _mark_not_ok(axes, found, look)
    size_axis(axes, [s.world_size or 0 for s in found], _unit(results))
    kind = "allocated" if on_gpu else "resident"
    axes.set_ylabel(f"{what}, {kind} ({'GiB' if large else 'MiB'})")
    _legend(figure, [axes], look)
    return figure


def _times(size: Size) -> tuple[float, ...]:
    """What the time figure shows of a size: every repeat."""
    if size.scaling != "weak" or not size.base_world_size or not size.world_size:
        return size.times_per_epoch_s
    share = size.world_size / size.base_world_size
    return tuple(t * share for t in size.times_per_epoch_s)


def _time_label(scaling: str, own: list[Size]) -> str:
    if scaling == "strong":
        return "time per epoch (s)"
    bases = {s.base_world_size for s in own if s.base_world_size}
    smallest = "" if bases == {1} else " / smallest size"
    return f"time per epoch \N{MULTIPLICATION SIGN} ranks{smallest} (s)"


def _lines(found: list[Size]) -> list[list[Size]]:
    """The sizes of each line: a series; where a size lies on nodes in two ways, each of them."""
    lines: dict[tuple[str, int | None], list[Size]] = {}
    for size in found:
        twins = Counter(s.world_size for s in found if s.series == size.series)
        nodes = size.nodes if max(twins.values()) > 1 else None
        lines.setdefault((size.series, nodes), []).append(size)
    return list(lines.values())


def _draw_line(
    axes: Axes, line: list[Size], look: Look, values: Callable[[Size], tuple[float, ...]]
) -> None:
    """The medians as a line, the range of the repeats as a band, each repeat as a dim point."""
    points = [(s.world_size or 0, sorted(values(s))) for s in line if values(s)]
    if not points:
        return
    x = [n for n, _ in points]
    middle = [median(v) for _, v in points]
    axes.plot(
        x,
        middle,
        color=look.colour,
        marker=look.marker,
        ms=look.size,
        ls=look.dashes,
        lw=look.width,
        zorder=look.layer,
    )
    if any(len(v) > 1 for _, v in points):
        low, high = [v[0] for _, v in points], [v[-1] for _, v in points]
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0, zorder=1)
        axes.vlines(x, low, high, color=look.colour, lw=1.2, zorder=2)
        repeats = [len(v) for _, v in points]
        every_x, every_y = np.repeat(x, repeats), [y for _, v in points for y in v]
        axes.scatter(every_x, every_y, s=12, color=look.colour, alpha=0.45, lw=0, zorder=2)
    if len({s.nodes for s in line}) == 1 and (line[0].nodes or 1) > 1:
        axes.annotate(
            f"{line[0].nodes} nodes", (x[-1], middle[-1]), (6, 6), textcoords="offset points"
        )


def _draw_ideal(axes: Axes, line: list[Size]) -> None:
    """From the smallest size that was measured: strong falls as 1 / size, weak stays."""
    known = [s for s in line if _times(s)]
    if len(known) < 2:
        return
    time, first = median(_times(known[0])), known[0].world_size or 0
    # Many points: on a linear axis the ideal is a curve.
    x = np.geomspace(first, max(s.world_size or 0 for s in line), 65)
    y = np.full_like(x, time) if known[0].scaling == "weak" else time * first / x
    axes.plot(x, y, color=GREY, lw=0.9, zorder=1.5, label=_IDEAL)


def _mark_not_ok(axes: Axes, own: Iterable[Size], look: dict[str, Look]) -> None:
    """A cross at the foot of the axes for each size with runs that are not ok, and their status."""
    marks = [s for s in own if s.not_ok]
    stacked: Counter[int] = Counter()
    last = max((s.world_size or 0 for s in own), default=0)
    for size in marks:
        n = size.world_size or 0
        y = 0.04 + _MARK_STEP * stacked[n]
        stacked[n] += 1
        place = axes.get_xaxis_transform()
        axes.plot(
            n, y, "x", color=look[size.series].colour, ms=7, mew=2.2, transform=place, zorder=4
        )
        counts = Counter(size.not_ok)
        text = ", ".join(s if c == 1 else f"{c} {s}" for s, c in sorted(counts.items()))
        left = n == last
        axes.annotate(
            f"{size.series}: {text}",
            (n, y),
            (-8 if left else 8, 0),
            xycoords=place,
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
            color="#333333",
        )
    if marks:
        _make_room(axes, (max(stacked.values()) + 1) * _MARK_STEP)


def _make_room(axes: Axes, share: float) -> None:
    """Lower the foot of a log axis, so that marks take that share of the height for themselves."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low * (low / high) ** (share / (1 - share)), high)


def _on_gpu(results: Results) -> bool:
    return bool((results.runs["device_type"] == "cuda").any())


def _unit(results: Results) -> str:
    return "GPUs" if _on_gpu(results) else "processes (ranks)"


def _legend(figure: Figure, axes: list[Axes], look: dict[str, Look]) -> None:
    """One legend under the panels: the series, then what a thin line and a cross are."""
    handles = [
        Line2D([], [], color=one.colour, marker=one.marker, ms=7, ls=one.dashes, label=name)
        for name, one in look.items()
    ]
    if any(line.get_label() == _IDEAL for a in axes for line in a.lines):
        handles.append(Line2D([], [], color=GREY, lw=0.9, label=_IDEAL))
    if any(line.get_marker() == "x" for a in axes for line in a.lines):
        cross = Line2D([], [], color=GREY, marker="x", ms=7, mew=2.2, ls="", label="run not ok")
        handles.append(cross)
    columns = min(len(handles), 3 if max(len(name) for name in look) > 18 else 5)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=9)


def _save(figure: Figure, path: Path) -> None:
    """Write a figure beside its place and rename it; the same figure gives the same bytes."""
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    metadata = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
    try:
        figure.savefig(beside, metadata=metadata)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
