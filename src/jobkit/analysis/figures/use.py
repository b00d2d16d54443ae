"""The figures of load over time and of energy over sizes."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.drawing import draw_line, fastest, legend, lines, mark_not_ok, unit
from jobkit.analysis.figures.style import Look, looks, new_figure, size_axis
from jobkit.analysis.figures.subtitle import subtitle

_NAMES = {"gpu_busy": "GPU busy (share of time)", "cpu_busy": "load of all cores (share)"}
_MEMORY = {
    "gpu_busy": ("gpu_memory_mib", "GPU memory in use (GiB)"),
    "cpu_busy": ("memory_mib", "memory of the node in use (GiB)"),
}
_MOST = 6  # series in the figure over time


def load_figure(results: Results) -> Figure | None:
    """Load and memory over time of one run of each series: the first ok one at its largest size.

    Of the GPUs if they were sampled, else of the nodes' processors; a line for each rank.
    """
    runs = results.runs[results.runs["status"] == "ok"].dropna(subset=["world_size"])
    for name in _NAMES:
        known = results.samples
        if len(known):
            known = known[known["run_id"].isin(runs["run_id"])].dropna(subset=[name, "at_s"])
        if len(known):
            break
    else:
        return None
    own = runs[runs["run_id"].isin(known["run_id"])].sort_values(
        ["world_size", "repeat"], ascending=[False, True], kind="stable"
    )
    shown, note = fastest(results, own["series"], _MOST)
    title = f"{results.name}: load and memory over time"
    words = f"one run of each series at its largest size, a line per sampling rank{note}"
    under = subtitle(results, shown=words)
    figure, (axes, memory) = new_figure(2, title, under)
    look = looks(s.series for s in results.sizes)
    of_memory, memory_label = _MEMORY[name]
    for series in shown:
        run_id = own[own["series"] == series]["run_id"].iloc[0]
        one = known[known["run_id"] == run_id]
        _draw_run(axes, one, name, look[series])
        _draw_run(memory, one.dropna(subset=[of_memory]), of_memory, look[series], 1024)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel(_NAMES[name])
    memory.set_ylim(bottom=0)
    memory.set_ylabel(memory_label)
    for each in (axes, memory):
        each.set_xlabel("time since the first sample (s)")
    legend(figure, [axes, memory], {series: look[series] for series in shown})
    return figure


def _draw_run(axes: Axes, samples: pd.DataFrame, name: str, look: Look, part: float = 1) -> None:
    """A line for each rank; part: of the values' unit, by which they are divided."""
    for _, one in samples.groupby(["attempt", "rank"]):
        ordered = one.sort_values("at_s")
        x, y = (ordered[k].astype(float).to_numpy() for k in ("at_s", name))
        axes.plot(x, y / part, color=look.colour, ls=look.dashes, lw=1.2, zorder=look.layer)


def energy_figure(results: Results) -> Figure | None:
    """Energy per unit of work over world sizes, medians of the repeats."""
    found = [s for s in results.sizes if s.world_size]
    known = [s for s in found if s.joules_per_work is not None]
    if not known or len({(s.joules_of, s.throughput_unit) for s in known}) > 1:
        return None
    work = known[0].throughput_unit.partition("/")[0].removesuffix("s")
    title = f"{results.name}: energy per {work}"
    figure, (axes,) = new_figure(1, title, subtitle(results, "median"))
    look = looks(s.series for s in found)
    for line in lines(found):
        draw_line(
            axes,
            line,
            look[line[0].series],
            lambda s: () if s.joules_per_work is None else (s.joules_per_work,),
        )
    axes.set_ylim(bottom=0)
    mark_not_ok(axes, found, look)
    size_axis(axes, sorted({s.devices or 0 for s in found}), unit(results))
    axes.set_ylabel(f"energy per {work} (J), of: {known[0].joules_of}")
    legend(figure, [axes], look)
    return figure
