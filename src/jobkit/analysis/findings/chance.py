"""How many of a study's comparisons differ, and how many chance alone would give."""

from collections import Counter

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.scaling import comparable_at
from jobkit.analysis.scaling.spread import CONFIDENCE


def by_chance(results: Results) -> list[str]:
    """A sentence on the comparisons of a study with repeats; empty without any.

    Compared are two series at one size, and a size with the one before in its series.
    """
    found = [s for s in results.sizes if s.throughput is not None]
    if not any(s.spread_from for s in found):
        return []
    series = Counter(map(comparable_at, found))
    smallest = {s.series: s.world_size or 0 for s in reversed(found)}  # they are in order
    pairs = alike = 0.0
    for size in found:
        # A pair of series counts half at each of them.
        pairs += (series[comparable_at(size)] - 1) / 2
        pairs += smallest[size.series] < (size.world_size or 0)
        names = [name for name in (size.not_distinguishable_from or "").split("; ") if name]
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
