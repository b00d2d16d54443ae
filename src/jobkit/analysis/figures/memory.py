"""The figure of peak memory over sizes."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import (
    draw_line,
    legend,
    lines,
    mark_not_ok,
    on_gpu,
    unit,
)
from jobkit.analysis.figures.style import PLAIN, Look, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.scaling.sizes import Size

_MIB_A_GIB = 1024


def memory_figure(results: Results) -> Figure | None:
    """Peak memory over world sizes, maximum over ranks."""
    found = [s for s in results.sizes if s.world_size]
    if not any(s.peaks_memory_mib for s in found):
        return None
    gpus = on_gpu(results)
    what = f"peak memory {_each(results)}"
    figure, (axes,) = new_figure(1, f"{results.name}: {what}", subtitle(results))
    look = looks(s.series for s in found)
    factor, text = _unit(max(m for s in found for m in s.peaks_memory_mib))

    def peaks(size: Size) -> tuple[float, ...]:
        return tuple(m * factor for m in size.peaks_memory_mib)

    for line in lines(found):
        draw_line(axes, line, look[line[0].series], peaks)
    _axes(axes, results, found, look)
    axes.set_ylabel(f"{what}, {'allocated' if gpus else 'resident'} ({text})")
    legend(figure, [axes], look)
    return figure


def _each(results: Results) -> str:
    return "per GPU" if on_gpu(results) else "per process"


def _unit(highest: float) -> tuple[float, str]:
    """What MiB are multiplied with for the axis, and its unit: GiB where the values are large."""
    return (1 / _MIB_A_GIB, "GiB") if highest >= 10 * _MIB_A_GIB else (1.0, "MiB")


def _axes(axes: Axes, results: Results, found: list[Size], look: dict[str, Look]) -> None:
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(PLAIN)
    mark_not_ok(axes, found, look)
    size_axis(axes, [s.devices or 0 for s in found], unit(results))
