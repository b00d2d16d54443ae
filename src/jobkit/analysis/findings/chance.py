"""How many of a study's comparisons differ, and how many chance alone would give."""

from collections.abc import Sequence

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import CONFIDENCE


def by_chance(results: Results) -> list[str]:
    """A sentence on the comparisons of a study with repeats; empty without any.

    Compared are two series at one size, and a size with the one before in its series.
    """
    found = [size for size in results.sizes if size.throughput is not None]
    if not any(size.spread_from for size in results.sizes):
        return []
    pairs = alike = 0.0
    for one in found:
        series, size = _compared(found, one)
        pairs += series / 2 + size  # a pair of series counts half at each of them
        text = one.not_distinguishable_from
        names = text.split("; ") if text else []
        before = sum(name.endswith((" rank", " ranks")) for name in names)
        alike += (len(names) - before) / 2 + before
    if pairs < 2:
        return []
    text = (
        f"{pairs - alike:.0f} of {pairs:.0f} comparisons (of series at one size, of neighbouring "
        f"sizes in one series) differ at {CONFIDENCE:.0%} confidence: were all equal, chance alone "
        f"would give about {pairs * (1 - CONFIDENCE):.1f}."
    )
    return [text]


def _compared(found: Sequence[Size], size: Size) -> tuple[int, bool]:
    """With how many series a size is compared, and whether there is a smaller size."""
    place = _place(size)
    smaller = any(
        other.series == size.series and (other.world_size or 0) < (size.world_size or 0)
        for other in found
    )
    return sum(_place(other) == place for other in found) - 1, smaller


def _place(size: Size) -> tuple[str | None, int | None, int | None]:
    return size.scaling, size.nodes, size.ranks_per_node
