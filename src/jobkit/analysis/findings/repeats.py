"""Whether a study has enough repeats for what its verdict says, and what to repeat if not."""

from collections.abc import Sequence
from itertools import pairwise

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import pool
from jobkit.analysis.tables.text import counted_ranks


def more_repeats(results: Results, series: str, least: float, unit: str) -> list[str]:
    """What to repeat so that the efficiency of a series is certain; empty where it is."""
    if measured_once(results.sizes):
        return ["No size has two successful repeats, so differences may be noise: repeat the runs."]
    found = [s for s in results.sizes if s.series == series and s.speed_up is not None]
    for before, size in pairwise(found):
        if before.world_size == size.world_size:
            continue  # on more nodes: the verdict is of the fewest
        low, high = size.efficiency_low, size.efficiency_high
        if low is not None and high is not None and low <= least <= high:
            on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
            sizes = f"{found[0].world_size} and {counted_ranks(size.world_size or 0, unit)}{on}"
            return [f"Undecided at {least:.0%} parallel efficiency: repeat {series} on {sizes}."]
    return []


def measured_once(found: Sequence[Size]) -> bool:
    """Whether sizes were measured and none was repeated, so that nothing is known of chance."""
    return any(s.rates for s in found) and pool([s.rates for s in found]) is None
