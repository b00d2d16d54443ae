"""The figure of load and memory over the time of a run."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import Look, fastest, legend, looks, new_figure, subtitle

# By the column of the load: its words, the column of the memory, its words.
_LOADS = {
    "gpu_busy": ("GPU busy (share of time)", "gpu_memory_mib", "GPU memory in use (GiB)"),
    "cpu_busy": ("load of all cores (share)", "memory_mib", "memory of the node in use (GiB)"),
}
_MAX_SERIES = 6


def load_figure(results: Results) -> Figure | None:
    """Load and memory over time of one run of each series: the first ok one at its largest size.

    Of the GPUs if they were sampled, else of the nodes' processors; a line for each rank.
    """
    runs = results.runs[results.runs["status"] == "ok"].dropna(subset=["world_size"])
    for name in _LOADS if len(results.samples) else ():
        known = results.samples[results.samples["run_id"].isin(runs["run_id"])]
        known = known.dropna(subset=[name, "at_s"])
        if len(known):
            break
    else:
        return None
    label, memory_name, memory_label = _LOADS[name]
    own = runs[runs["run_id"].isin(known["run_id"])].sort_values(
        ["world_size", "repeat"], ascending=[False, True], kind="stable"
    )
    shown, note = fastest(results, own["series"], _MAX_SERIES)
    words = f"one run of each series at its largest size, a line per sampling rank{note}"
    title = f"{results.name}: load and memory over time"
    figure, (load, memory) = new_figure(2, title, subtitle(results, shown=words))
    look = looks(s.series for s in results.sizes)
    for series in shown:
        samples = known[known["run_id"] == own[own["series"] == series]["run_id"].iloc[0]]
        _draw_run(load, samples, name, look[series])
        _draw_run(memory, samples.dropna(subset=[memory_name]), memory_name, look[series], 1024)
    load.set_ylim(0, 1.05)
    load.set_ylabel(label)
    memory.set_ylim(bottom=0)
    memory.set_ylabel(memory_label)
    for axes in (load, memory):
        axes.set_xlabel("time since the first sample (s)")
    legend(figure, [load, memory], {series: look[series] for series in shown})
    return figure


def _draw_run(axes: Axes, samples: pd.DataFrame, name: str, look: Look, part: float = 1) -> None:
    """A line for each rank; part: of the values' unit, by which they are divided."""
    for _, of_rank in samples.groupby(["attempt", "rank"]):
        ordered = of_rank.sort_values("at_s")
        x, y = (ordered[k].astype(float).to_numpy() for k in ("at_s", name))
        axes.plot(x, y / part, color=look.colour, ls=look.dashes, lw=1.2, zorder=look.layer)
