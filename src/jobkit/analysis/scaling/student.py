"""Student's t distribution."""

import math
from functools import cache

import numpy as np

_POINTS = 1001
_MANY, _FAR = 30, 40.0  # degrees of freedom from which nothing lies beyond so many deviations


def tail(t: float, freedom: float) -> float:
    """The two-sided tail of Student's t: with t = sqrt(v) tan(a) the density is cos(a)^(v - 1)."""

    high = math.pi / 2 if freedom < _MANY else math.atan(_FAR / math.sqrt(freedom))

    def area(low: float) -> float:
        angles = np.linspace(low, high, _POINTS)
        heights = np.clip(np.cos(angles), 0.0, None) ** (freedom - 1)
        return float(np.trapezoid(heights, angles))

    return min(1.0, max(0.0, area(math.atan(t / math.sqrt(freedom))) / area(0.0)))


@cache
def quantile(freedom: float, confidence: float) -> float:
    """The two-sided quantile of Student's t, also between whole degrees of freedom."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - confidence else (low, middle)
    return high
