"""Confidence of a median: bootstrap intervals, and outliers."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): modified z-score over 3.5.
_Z, _Z_FACTOR = 3.5, 0.6745
_LEAST_SHARE = 0.05  # a value this near to the median is no outlier, however small the MAD
Values = NDArray[np.float64]


def medians(values: Sequence[float], label: str, seed: int = 0) -> Values | None:
    """Medians of resamples of the values (Efron's bootstrap); None for less than two values.

    The label makes the draws of one size independent of another's, and the same every time.
    """
    if len(values) < 2:
        return None
    generator = np.random.default_rng([seed, zlib.crc32(label.encode())])
    drawn = generator.choice(np.asarray(values, float), (RESAMPLES, len(values)))
    return np.asarray(np.median(drawn, axis=1), float)


def interval(samples: Values) -> tuple[float, float]:
    """The percentile interval of resampled values."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(samples, [tail, 100 - tail])
    return float(low), float(high)


def confidence(count: int) -> float:
    """The highest confidence that an interval from this many values can have.

    The range of n values holds the median with a probability of 1 - 2**(1 - n) (the sign test):
    three repeats give 75 % and no more.
    """
    return min(CONFIDENCE, 1 - 2.0 ** (1 - count))


def outliers(values: Sequence[float]) -> list[bool]:
    """Which values are outliers, by their distance from the median over the MAD."""
    if len(values) < 3:
        return [False] * len(values)
    given = np.asarray(values, float)
    middle = float(np.median(given))
    away = np.abs(given - middle)
    far = _Z_FACTOR * away > _Z * float(np.median(away))
    return [bool(f) for f in far & (away > _LEAST_SHARE * abs(middle))]
