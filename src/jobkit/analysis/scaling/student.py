"""Welch's t test, and Holm's correction for several tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobkit.analysis.scaling.spread import CONFIDENCE

_LEAST_DEVIATION = 1e-3  # repeats that agree better do so by chance or rounding
_POINTS = 1001


@dataclass(frozen=True)
class Welch:
    """The difference of two means, and what its test needs (Welch, Biometrika 34, 1947)."""

    difference: float
    error: float  # standard error of the difference
    freedom: float  # by Welch and Satterthwaite

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the difference."""
        half = quantile(self.freedom) * self.error
        return self.difference - half, self.difference + half

    def p_value(self, margin: float = 0.0) -> float:
        """Two-sided: how often chance alone takes a difference this far beyond the margin."""
        return tail(max(0.0, abs(self.difference) - margin) / self.error, self.freedom)


def welch(one: Sequence[float], other: Sequence[float]) -> Welch:
    """Compare the means of two samples of two values or more, which may vary differently."""
    parts = []
    for values in (one, other):
        deviation = max(float(np.std(values, ddof=1)), _LEAST_DEVIATION)
        parts.append((deviation**2 / len(values), len(values) - 1))
    total = sum(square for square, _ in parts)
    freedom = total**2 / sum(square**2 / free for square, free in parts)
    return Welch(float(np.mean(one) - np.mean(other)), math.sqrt(total), freedom)


def tail(t: float, freedom: float) -> float:
    """The two-sided tail of Student's t: with t = sqrt(v) tan(a) the density is cos(a)^(v - 1)."""

    def area(low: float) -> float:
        angles = np.linspace(low, math.pi / 2, _POINTS)
        heights = np.clip(np.cos(angles), 0.0, None) ** (freedom - 1)
        return float(np.trapezoid(heights, angles))

    return min(1.0, area(math.atan(t / math.sqrt(freedom))) / area(0.0))


def quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t, also between whole degrees of freedom."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - confidence else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm, Scand. J. Statistics 6, 1979), in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, least = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, (len(p_values) - rank) * p_values[i])
        corrected[i] = min(1.0, least)
    return corrected
