"""Welch's t test, and Holm's correction for several tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.scaling.student import quantile, tail

_LEAST_DEVIATION = 1e-3  # repeats that agree better do so by chance or rounding


@dataclass(frozen=True)
class Welch:
    """The difference of two means, and what its test needs (Welch, Biometrika 34, 1947)."""

    difference: float
    error: float  # standard error of the difference
    freedom: float  # by Welch and Satterthwaite

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the difference."""
        half = quantile(self.freedom, CONFIDENCE) * self.error
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


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm, Scand. J. Statistics 6, 1979), in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, least = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, (len(p_values) - rank) * p_values[i])
        corrected[i] = min(1.0, least)
    return corrected
