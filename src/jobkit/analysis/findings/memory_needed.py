"""Which series needs the least memory per GPU or process, at the largest size that several have."""

import math
from collections.abc import Sequence
from statistics import median

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.scaling.welch import Welch, holm, welch
from jobkit.analysis.tables.text import counted_ranks

_MANY = 5  # series that are compared with the least one by one; of more, the last


def memory_needed(results: Results, unit: str) -> list[str]:
    """A sentence on the peak memory of the series at their largest common size; else none.

    The ratio of each to the least is tested on the logarithms of the repeats, corrected for the
    number of series (Holm). Series that compute on other kinds of device are not compared.
    """
    groups: dict[tuple[object, ...], list[Size]] = {}
    for size in results.sizes:
        # The one process of dp drives several GPUs, and its peak is that of the first.
        alone = size.devices == size.world_size and not size.note
        if alone and size.world_size and all(m > 0 for m in size.peaks_memory_mib):
            key = (size.scaling, size.world_size, size.nodes, size.ranks_per_node)
            groups.setdefault(key, []).extend([size] * bool(size.peaks_memory_mib))
    several = [group for group in groups.values() if len(group) > 1 and _one_device(results, group)]
    if not several:
        return []
    return [_sentence(max(several, key=lambda group: group[0].world_size or 0), unit)]


def _one_device(results: Results, group: Sequence[Size]) -> bool:
    ids = [run for size in group for run in size.ok_runs]
    runs = results.runs[results.runs["run_id"].isin(ids)]
    return bool(runs["device_type"].dropna().nunique() < 2)


def _sentence(group: Sequence[Size], unit: str) -> str:
    least, *others = sorted(group, key=lambda size: median(size.peaks_memory_mib))
    what = "Peak memory per GPU" if unit == "GPUs" else "Peak memory per process"
    nodes = f" of {least.nodes} nodes" if (least.nodes or 1) > 1 else ""
    where = f"{counted_ranks(least.world_size or 0, unit)}{nodes}"
    kind = f" ({least.scaling} scaling)" if least.scaling else ""
    tests = [_test(least, other) for other in others]
    corrected = iter(holm([test.p_value() for test in tests if test]))
    each = [
        _compared(least, other, test, next(corrected) if test else None)
        for other, test in zip(others, tests, strict=True)
    ]
    shown = each if len(each) <= _MANY else each[-1:]
    left = len(each) - len(shown)
    more = f" ({left} more series between)" if left else ""
    alike = all(text.endswith(" the same") for text in each)
    low = f"{least.series} has {'' if alike else 'the least, '}"
    low += f"{median(least.peaks_memory_mib):,.0f} MiB"
    return f"{what} on {where}{kind}: {low}; {'; '.join(shown)}{more}."


def _test(least: Size, other: Size) -> Welch | None:
    """The test of the ratio; None with one run on either side."""
    logs = [[math.log(m) for m in size.peaks_memory_mib] for size in (other, least)]
    return welch(*logs) if min(map(len, logs)) > 1 else None


def _compared(least: Size, other: Size, test: Welch | None, p_value: float | None) -> str:
    """How much more a series has than the least one, and whether that may be chance."""
    ratio = median(other.peaks_memory_mib) / median(least.peaks_memory_mib)
    factor = f"{math.exp(test.difference) if test else ratio:.3g}"
    if factor == "1":
        return f"{other.series} the same"
    text = f"{other.series} {factor} times that "
    if test is None or p_value is None:
        return f"{text}(may be chance: not repeated)"
    low, high = (math.exp(end) for end in test.interval)
    text += f"[{CONFIDENCE:.0%}: {low:.3g} to {high:.3g}]"
    return text if p_value < 1 - CONFIDENCE else f"{text}, may be chance"
