"""GPUs that are idle during a training, and what the work costs in energy, in words."""

from collections.abc import Sequence

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.learned import differ
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import computing, counted, counted_ranks

BUSY = 0.8  # of the time: below it a GPU counts as idle
_WAITS = 0.1  # share of the time in which waiting for data explains it


def idle_gpus(results: Results, unit: str) -> list[str]:
    """A sentence on the size whose GPUs are least busy, if they are idle; else none."""
    needed, ok = ["series", "world_size", "gpu_busy_mean"], results.runs["status"] == "ok"
    runs = results.runs.loc[ok, [*needed, "devices", "data_wait_share", "epochs_planned"]]
    known = runs.dropna(subset=needed)
    if known.empty:
        return []
    names = ["gpu_busy_mean", "data_wait_share", "devices"]
    middle = known.groupby(["series", "world_size"], as_index=False)[names].median()
    worst = records(middle.loc[[middle["gpu_busy_mean"].astype(float).idxmin()]])[0]
    busy, wait = float(worst["gpu_busy_mean"]), worst["data_wait_share"]
    if busy >= BUSY:
        return []
    where = f"{worst['series']} on {counted_ranks(computing(worst, unit), unit)}"
    head = f"{where}: the GPU is busy {busy:.0%} of the time, evaluation included"
    if pd.isna(wait):
        return [f"{head}; the wait for data was not measured."]
    if wait >= _WAITS:
        return [f"{head}: {wait:.0%} of the training it waits for data."]
    text = f"Data wait is {wait:.0%}, yet in {head}: small kernels, or a host that issues them too "
    own = known["series"] == worst["series"]
    by_jobkit = known.loc[own, "epochs_planned"].notna().any()  # others may not know the option
    return [f"{text}slowly; try a larger batch per GPU{', or --compile' if by_jobkit else ''}."]


def energy(results: Results, unit: str) -> list[str]:
    """A sentence on the size that needs the least energy for its work; none if not measured."""
    known = [s for s in results.sizes if s.joules_per_work is not None and s.throughput]
    groups = {(s.joules_of, s.throughput_unit) for s in known}
    if len(known) < 2 or len(groups) > 1:
        return []
    least = min(known, key=lambda s: s.joules_per_work or 0)
    fastest = max(known, key=lambda s: s.throughput or 0)
    name = least.throughput_unit.partition("/")[0].removesuffix("s")
    assert least.joules_per_work is not None and fastest.joules_per_work is not None
    text = (
        f"Energy ({least.joules_of}): {least.series} on "
        f"{counted_ranks(least.devices or 1, unit)}{_nodes(least, known)} needs the least, "
        f"{least.joules_per_work:.3g} J per {name}"
    )
    if fastest is least or not least.joules_per_work:
        return [f"{text}."]
    factor = fastest.joules_per_work / least.joules_per_work
    name = f"{fastest.series} on {counted_ranks(fastest.devices or 1, unit)}"
    all_known = len(known) == sum(s.throughput is not None for s in results.sizes)
    of = "" if all_known else " of those with an energy"
    text += f"; {name}{_nodes(fastest, known)}, the fastest{of}, needs {factor:.2f} times as much"
    runs = results.runs.dropna(subset=["joules_per_work"]).set_index("run_id")["joules_per_work"]
    ends = [[runs[r] for r in size.ok_runs if r in runs] for size in (least, fastest)]
    return [f"{text}{'' if differ(*ends) else ', which may be chance'}."]


def _nodes(one: Size, known: Sequence[Size]) -> str:
    """The nodes of a size, where another of its series has as many ranks."""
    alike = [s for s in known if (s.series, s.world_size) == (one.series, one.world_size)]
    return f" of {counted(one.nodes or 1, 'node')}" if len(alike) > 1 else ""
