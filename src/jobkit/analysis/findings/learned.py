"""Whether loss and accuracy change with the size, and which series needs the least memory.

A difference counts where the ranges of the repeats do not overlap.
"""

from collections.abc import Callable, Sequence
from statistics import median

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.text import counted_ranks, say_accuracy

_MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "val_loss": ("validation loss", "{:.4g}".format),
    "val_accuracy": ("accuracy", say_accuracy),
}


def learned(results: Results, unit: str) -> list[str]:
    """What the final loss and accuracy do from the smallest to the largest size of each series."""
    made: list[str] = []
    for column, (name, say) in _MEASURES.items():
        values = results.runs.dropna(subset=[column]).set_index("run_id")[column].astype(float)
        seen: list[float] = []
        repeated = True
        for small, large in _ends(results):
            of = [[values[r] for r in size.ok_runs if r in values] for size in (small, large)]
            if not all(of) or len({_epochs_of(results, s) for s in (small, large)}) > 1:
                continue
            seen += [median(own) for own in of]
            repeated = repeated and min(map(len, of)) > 1
            if not differ(*of):
                continue
            verb = "rises" if seen[-1] > seen[-2] else "falls"
            text = f"{small.series}: the {name} {verb} from {say(seen[-2])} on "
            text += f"{_where(small, unit)} to {say(seen[-1])} on {_where(large, unit)}"
            if small.global_batch_size != large.global_batch_size:
                batches = f"{small.global_batch_size} and {large.global_batch_size}"
                text += f" (global batches of {batches})"
            made.append(f"{text}{'' if min(map(len, of)) > 1 else ': may be chance, repeat it'}.")
        if seen and not any(f"the {name} " in text for text in made):
            low, high = say(min(seen)), say(max(seen))
            ends = low if low == high else f"{low} to {high}"
            beyond = " beyond the repeats" if repeated else ""
            made.append(f"The {name} does not change with the size{beyond}: {ends}.")
    return made


def _epochs_of(results: Results, size: Size) -> tuple[int, ...]:
    """The numbers of epochs that the runs of a size were trained for."""
    own = results.runs["run_id"].isin(size.ok_runs)
    return tuple(sorted({int(n) for n in results.runs.loc[own, "epochs_done"].dropna()}))


def differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two sets of repeats do not overlap."""
    return max(one) < min(other) or max(other) < min(one)


def _ends(results: Results) -> list[tuple[Size, Size]]:
    """The smallest and the largest size of each series that may be compared."""
    made = []
    for name in dict.fromkeys(s.series for s in results.sizes if not s.note):
        own = [s for s in results.sizes if s.series == name and s.ok_runs and s.world_size]
        if own and own[0].world_size != own[-1].world_size:
            made.append((own[0], own[-1]))
    return made


def memory_needed(results: Results, unit: str) -> list[str]:
    """The peak memory of the series at the largest size that several have; else nothing."""
    groups: dict[tuple[object, ...], list[Size]] = {}
    for size in results.sizes:
        # The one process of dp drives several GPUs, and its peak is that of the first.
        alone = size.devices == size.world_size and not size.note
        if alone and size.world_size and size.peak_memory_mib:
            key = (size.scaling, size.world_size, size.nodes, size.ranks_per_node)
            groups.setdefault(key, []).append(size)
    several = [g for g in groups.values() if len(g) > 1 and len(_devices(results, g)) < 2]
    if not several:
        return []
    group = max(several, key=lambda g: g[0].world_size or 0)
    least, *others = sorted(group, key=lambda s: s.peak_memory_mib or 0)
    if not differ(least.peaks_memory_mib, others[-1].peaks_memory_mib):
        return []
    each = [f"{s.series} {s.peak_memory_mib:,.0f} MiB" for s in (least, *others)]
    shown = each if len(each) < 6 else [each[0], "...", each[-1]]
    kind = "GPU" if unit == "GPUs" else "process"
    return [f"Least memory per {kind} on {_where(least, unit)}: {', '.join(shown)}."]


def _devices(results: Results, group: Sequence[Size]) -> set[str]:
    ids = [run for size in group for run in size.ok_runs]
    return set(results.runs.loc[results.runs["run_id"].isin(ids), "device_type"].dropna())


def _where(size: Size, unit: str) -> str:
    on = f" of {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    return f"{counted_ranks(size.world_size or 0, unit)}{on}"
