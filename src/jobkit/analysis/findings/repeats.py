"""Whether a study has enough repeats for what its verdict says, and what to run if not."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import Pool, pool
from jobkit.analysis.tables.text import counted, counted_ranks

_MOST = 20  # further repeats that are still a proposal


def more_repeats(results: Results, series: str, least: float, unit: str) -> list[str]:
    """What to repeat so that the efficiency of a series is certain; empty where it is."""
    found = [s for s in results.sizes if s.series == series and s.speed_up is not None]
    shared = _pooled(results.sizes)
    if shared is None:
        cost = _cost(results, found, 2)
        text = "No size has two successful repeats, so differences may be noise. Repeat the runs: "
        return [f"{text}2 more repeats of every size of {series}{cost} give intervals."]
    for before, size in pairwise(found):
        if before.world_size == size.world_size:
            continue  # on more nodes: the verdict is of the fewest
        low, high = size.efficiency_low, size.efficiency_high
        if low is not None and high is not None and low <= least <= high:
            return [_proposal(results, found[0], size, shared, least, unit)]
    return []


def measured_once(found: Sequence[Size]) -> bool:
    """Whether sizes were measured and none was repeated, so that nothing is known of chance."""
    return any(s.rates for s in found) and _pooled(found) is None


def _pooled(found: Sequence[Size]) -> Pool | None:
    return pool([s.rates for s in found])


def _proposal(
    results: Results, base: Size, size: Size, shared: Pool, least: float, unit: str
) -> str:
    """How many repeats of a size and its baseline would show on which side of least it is."""
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    where = f"{counted_ranks(size.world_size or 0, unit)}{on}"
    pair = f"{base.world_size} and {where}"
    gap = abs(math.log((size.efficiency or 0) / least))
    more = next((k for k in range(1, _MOST + 1) if _half_width(base, size, shared, k) < gap), None)
    if more is None:
        return (
            f"Whether {size.series} has {least:.0%} parallel efficiency at {where} is too close to "
            f"decide with {_MOST} more repeats."
        )
    cost = _cost(results, [base, size], more)
    return (
        f"{counted(more, 'more repeat')} of {size.series} on {pair}{cost} would show whether it "
        f"has {least:.0%} parallel efficiency there, if the medians stay."
    )


def _half_width(base: Size, size: Size, shared: Pool, more: int) -> float:
    """Half of the interval's width, as a logarithm, with that many more repeats of both sizes."""
    later = replace(shared, freedom=shared.freedom + 2 * more)
    sets: list[Sequence[float]] = []
    for one in (base, size):
        rates = sorted(one.rates)
        sets.append([*rates, *(rates[len(rates) // 2],) * more])
    # Copies of the median lower a size's own spread; the pooled one is the least that counts.
    return later.half_width(*sets)


def _cost(results: Results, found: Sequence[Size], more: int) -> str:
    """What repeats of sizes cost, by the runs' total times; empty where these are not known."""
    if not found:
        return ""
    hours = 0.0
    for size in found:
        own = results.runs["run_id"].isin(size.ok_runs)
        times = results.runs.loc[own, "total_time_s"].dropna()
        if times.empty:
            return ""
        hours += more * float(times.median()) * (size.nodes or 1) / 3600
    return f" ({hours:.2g} node-hours)"
