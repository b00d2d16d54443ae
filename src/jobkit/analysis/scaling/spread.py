"""The run-to-run spread of a study, pooled over its sizes; intervals, differences and outliers.

Rates are compared as logarithms, about the median of their size. The spread of all sizes with two
repeats or more is pooled, so that a size with three repeats has the certainty of them all; where a
size's own spread is larger, that counts. Epochs of one run are no sample of runs and count nowhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from jobkit.analysis.scaling.student import quantile

Values = NDArray[np.float64]
CONFIDENCE = 0.95
# Standard deviation of the median of n normal values over that of their mean (David and Nagaraja,
# "Order Statistics", 2003, section 10.2, and by simulation); sqrt(pi / 2) for many.
_MEDIAN = {1: 1.0, 2: 1.0, 3: 1.160, 4: 1.092, 5: 1.198, 6: 1.135, 7: 1.214, 8: 1.160, 9: 1.223}
_MANY = {0: 1.20, 1: 1.24}  # even, odd
# The lower quartile of the distances of two values from each other, over the standard deviation,
# as in the estimator Qn (Rousseeuw and Croux, JASA 88, 1993): half of the runs may be outliers.
_QUARTILE = math.sqrt(2) * NormalDist().inv_cdf(0.625)
_FALSE = 0.002  # two-sided probability that a sound run is called an outlier
_MOST_PAIRED = 1000  # values of a size whose pairs are compared: half a million pairs
_LEAST_SHARE = 0.05  # a value this near to the median is no outlier, however small the spread


@dataclass(frozen=True)
class Pool:
    """The spread of one run, as a logarithm, that the repeats of a study show together."""

    deviation: float
    freedom: int  # repeats - sizes with repeats
    sizes: int  # with two repeats or more
    limit: float  # a logarithm farther than this from its size's median is an outlier

    def half_width(self, *sets: Sequence[float]) -> float:
        """Half of the 95 % interval of the logarithm of a median, or of two medians' ratio."""
        return quantile(self.freedom, CONFIDENCE) * math.hypot(*map(self.error, sets))

    def error(self, values: Sequence[float]) -> float:
        """The standard error of the logarithm of the values' median."""
        count, logs = len(values), np.log(values)
        sound = logs[~_wrong(logs, self.limit)]
        own = float(np.std(sound, ddof=1)) if len(sound) > 1 else 0.0
        factor = _MEDIAN.get(count, _MANY[count % 2])
        return factor * max(self.deviation, own) / math.sqrt(count)

    def differ(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Whether two sets of repeats differ in their medians, with a confidence of 95 %."""
        gap = abs(math.log(float(np.median(one)) / float(np.median(other))))
        return gap > self.half_width(one, other)


def pool(groups: Sequence[Sequence[float]]) -> Pool | None:
    """The pooled spread of the repeats of each size, without outliers; None without repeats.

    With few repeats a spread of 0 may be chance or rounding, and is at least 0.1 %.
    """
    groups = [g for g in groups if all(0 < v < math.inf for v in g)]
    flags = outliers(groups)
    kept = [
        [v for v, wrong in zip(group, flag, strict=True) if not wrong]
        for group, flag in zip(groups, flags, strict=True)
    ]
    logs = [np.log(group) for group in kept if len(group) > 1]
    freedom = sum(len(g) - 1 for g in logs)
    if not freedom:
        return None
    squares = sum(float(((g - g.mean()) ** 2).sum()) for g in logs)
    deviation = max(1e-3, math.sqrt(squares / freedom))
    return Pool(deviation, freedom, len(logs), _limit([np.log(g) for g in groups]))


def outliers(groups: Sequence[Sequence[float]]) -> list[list[bool]]:
    """Which values of each size are outliers: too far from its median for the study's spread.

    Only a size with three values or more has any, and never half of them: these are no outliers but
    its spread, as of two kinds of nodes. One slow run in 20 does not widen the spread, which is
    that of the nearest quarter of all pairs of repeats.
    """
    logs = [np.log(np.clip(g, 1e-300, 1e300)) for g in groups]
    limit = _limit(logs)
    return [_wrong(g, limit).tolist() for g in logs]


def _wrong(logs: Values, limit: float) -> NDArray[np.bool_]:
    """Which logarithms of one size's values are outliers."""
    far = np.asarray(abs(logs - np.median(logs)) > limit) if len(logs) else np.zeros(0, bool)
    return far if len(logs) > 2 and 2 * far.sum() < len(logs) else np.zeros(len(logs), bool)


def _limit(logs: Sequence[Values]) -> float:
    """How far the logarithm of a sound value may be from the median of its size."""
    gaps = np.concatenate([np.empty(0), *map(_gaps, logs)])
    if not len(gaps):
        return math.inf
    freedom = sum(len(g) - 1 for g in logs if len(g))
    limit = quantile(freedom, 1 - _FALSE) * float(np.quantile(gaps, 0.25)) / _QUARTILE
    return max(limit, -math.log1p(-_LEAST_SHARE))


def _gaps(values: Values) -> Values:
    """The distances of the values from each other; of many, every k-th value."""
    some = values[:: -(-len(values) // _MOST_PAIRED) or 1]
    first, second = np.triu_indices(len(some), 1)
    return np.asarray(abs(some[first] - some[second]))
