"""The run-to-run spread of a study: intervals, differences and outliers.

Rates are compared as logarithms, about the median of their size. The spread is that of the repeats
of all sizes together, and may grow or fall with the number of ranks: a spread s x N^g is averaged
over g by how well it explains the repeats. Where a size's own spread is larger, that counts. Epochs
of one run are no sample of runs and count nowhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Sample = tuple[Sequence[float], int]  # the rates of the repeats of a size, and its ranks
CONFIDENCE = 0.95
MAX_OTHER_LOAD = 0.05  # of the cores, used by other programs: beyond it rates may be disturbed
MIN_DEVIATION = 1e-3  # of a run: repeats that agree better do so by chance or rounding
# Standard deviation of the median of n normal values over that of their mean (David and Nagaraja,
# "Order Statistics", 2003, section 10.2, and by simulation); sqrt(pi / 2) for many.
_MEDIAN = {1: 1.0, 2: 1.0, 3: 1.160, 4: 1.092, 5: 1.198, 6: 1.135, 7: 1.214, 8: 1.160, 9: 1.223}
_MANY = {0: 1.20, 1: 1.24}  # even, odd
# Exponents g of a spread that changes with the ranks, and their prior: half for no change.
_GROWTHS = np.linspace(-1, 1.25, 10)
_PRIOR = np.where(_GROWTHS == 0, 0.5, 0.5 / (len(_GROWTHS) - 1))
# The lower quartile of the distances of two values from each other, over the standard deviation,
# as in the estimator Qn (Rousseeuw and Croux, JASA 88, 1993): half of the runs may be outliers.
_QUARTILE = math.sqrt(2) * NormalDist().inv_cdf(0.625)
_FALSE = 0.002  # two-sided probability that a sound run is called an outlier
_MAX_PAIRED = 1000  # values of a size whose pairs are compared: half a million pairs
_MIN_SHARE = 0.05  # a value this near to the median is no outlier, however small the spread
_MAX_WIDTH = 100.0  # of half an interval, a logarithm: rates from logs may be any number
_MAX_OUTLIERS = 0.05  # of the runs: more of them are no outliers but the spread

_POINTS = 20_001  # of Student's distribution
_FREE, _FAR = 30, 40.0  # degrees of freedom from which nothing lies beyond so many deviations


@dataclass(frozen=True)
class Pool:
    """The spread of one run, as a logarithm, that the repeats of a study show together."""

    variances: Values  # of each of _GROWTHS, weighted, at middle
    middle: float  # log2 of the ranks where these variances hold
    ends: tuple[float, float]  # the same of the smallest and the largest size with repeats
    freedom: int  # repeats - sizes with repeats
    sizes: int  # with two repeats or more
    limit: float  # a logarithm farther than this from its size's median is an outlier

    def deviation(self, ranks: int) -> float:
        """The standard deviation of one run at a size."""
        far = np.clip(math.log2(ranks), *self.ends) - self.middle
        return math.sqrt(self.variances @ 4.0 ** (_GROWTHS * far))

    def half_width(self, *samples: Sample) -> float:
        """Half of the 95 % interval of the logarithm of a median, or of two medians' ratio."""
        half = quantile(self.freedom, CONFIDENCE) * math.hypot(*map(self.error, samples))
        return min(half, _MAX_WIDTH)

    def error(self, sample: Sample) -> float:
        """The standard error of the logarithm of the values' median."""
        values, ranks = sample
        count, logs = len(values), np.log(values)
        sound = logs[~_far(logs, self.limit)]
        own = float(np.std(sound, ddof=1)) if len(sound) > 1 else 0.0
        factor = _MEDIAN.get(count, _MANY[count % 2])
        return factor * max(self.deviation(ranks), own, MIN_DEVIATION) / math.sqrt(count)

    def differ(self, sample: Sample, other: Sample) -> bool:
        """Whether two sets of repeats differ in their medians, with a confidence of 95 %."""
        gap = abs(math.log(float(np.median(sample[0])) / float(np.median(other[0]))))
        return gap > self.half_width(sample, other)


def pool(samples: Sequence[Sample]) -> Pool | None:
    """The spread of the repeats of all sizes; None without repeats.

    Outliers stay out of it where they are at most 5 % of the runs.
    """
    samples = [sample for sample in samples if sample[0]]
    logs = [np.log(values) for values, _ in samples]
    limit = _limit(logs)
    if sum(int(_far(own, limit).sum()) for own in logs) > _MAX_OUTLIERS * sum(map(len, logs)):
        limit = math.inf
    sound = [group[~_far(group, limit)] for group in logs]
    repeated = [(g, ranks) for g, (_, ranks) in zip(sound, samples, strict=True) if len(g) > 1]
    if not repeated:
        return None
    freedoms = np.array([len(group) - 1 for group, _ in repeated], float)
    freedom, places = freedoms.sum(), np.log2([ranks for _, ranks in repeated])
    middle = float(np.average(places, weights=freedoms))
    squares = np.array([((group - group.mean()) ** 2).sum() for group, _ in repeated])
    # The likelihood of each exponent, with the spread itself integrated out.
    scaled = np.maximum(4.0 ** np.outer(-_GROWTHS, places - middle) @ squares, 1e-12)
    heights = -0.5 * freedom * np.log(scaled)  # the weights are centred: no other term is left
    weights = _PRIOR * np.exp(heights - heights.max())
    variances = weights / weights.sum() * np.maximum(scaled / freedom, MIN_DEVIATION**2)
    ends = float(places.min()), float(places.max())
    return Pool(variances, middle, ends, int(freedom), len(repeated), limit)


def outliers(groups: Sequence[Sequence[float]]) -> list[list[bool]]:
    """Which values of each size are outliers: too far from its median for the study's spread.

    Only a size with three values or more has any, and never half of them: these are no outliers but
    its spread, as of two kinds of nodes. One slow run in 20 does not widen the spread, which is
    that of the nearest quarter of all pairs of repeats.
    """
    logs = [np.log(np.clip(g, 1e-300, 1e300)) for g in groups]
    limit = _limit(logs)
    return [_far(g, limit).tolist() for g in logs]


def _far(logs: Values, limit: float) -> NDArray[np.bool_]:
    """Which logarithms of one size's values are outliers."""
    far = abs(logs - (np.median(logs) if len(logs) else 0.0)) > limit
    return np.asarray(far & (len(logs) > 2 and 2 * far.sum() < len(logs)))


def _limit(logs: Sequence[Values]) -> float:
    """How far the logarithm of a sound value may be from the median of its size."""
    gaps = [np.empty(0)]  # the distances of the values from each other; of many, every k-th
    for own in logs:
        some = own[:: -(-len(own) // _MAX_PAIRED) or 1]
        first, second = np.triu_indices(len(some), 1)
        gaps.append(abs(some[first] - some[second]))
    if not len(together := np.concatenate(gaps)):
        return math.inf
    freedom = sum(len(g) - 1 for g in logs if len(g))
    limit = quantile(freedom, 1 - _FALSE) * float(np.quantile(together, 0.25)) / _QUARTILE
    return max(limit, -math.log1p(-_MIN_SHARE))


@cache
def _tails(freedom: float) -> tuple[Values, Values]:
    """Angles a and the two-sided tails of Student's t beyond sqrt(freedom) x tan(a).

    With t = sqrt(v) tan(a) the density is cos(a)^(v - 1).
    """
    high = math.pi / 2 if freedom < _FREE else math.atan(_FAR / math.sqrt(freedom))
    angles = np.linspace(0, high, _POINTS)
    heights = np.cos(angles) ** (freedom - 1)
    beyond = np.append(np.cumsum((heights[1:] + heights[:-1])[::-1])[::-1], 0)
    return angles, beyond / beyond[0]


def tail(t: float, freedom: float) -> float:
    """The two-sided tail of Student's t."""
    return float(np.interp(math.atan(t / math.sqrt(freedom)), *_tails(freedom)))


def quantile(freedom: float, confidence: float) -> float:
    """The two-sided quantile of Student's t, also between whole degrees of freedom."""
    angles, tails = _tails(freedom)
    return math.sqrt(freedom) * math.tan(np.interp(1 - confidence, tails[::-1], angles[::-1]))
