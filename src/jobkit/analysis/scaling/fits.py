"""Scaling laws fitted to one curve: they describe it; predict.py predicts larger sizes.

With X(N) the rate on N ranks and c = X(1), each law is linear in its unknowns:

    amdahl     N / X(N) = (1 + s (N-1)) / c                   s the serial fraction
               (Amdahl, AFIPS 1967)
    usl        N / X(N) = (1 + a (N-1) + b N (N-1)) / c       a contention, b coherency
               (Gunther, "Guerrilla Capacity Planning", 2007: the Universal Scalability Law)
    gustafson  X(N) = c (N - s (N-1))                         s the serial fraction, weak scaling
               (Gustafson, CACM 31, 1988)

so that least squares with the same relative error at every size have a closed form. Every run
is a point of its own. Intervals are Student's, at 95 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobkit.analysis.scaling.spread import CONFIDENCE, quantile
from jobkit.errors import UsageError

Values = NDArray[np.float64]
# By law: the names of its unknowns after c.
LAWS = {
    "amdahl": ("serial_fraction",),
    "usl": ("contention", "coherency"),
    "gustafson": ("serial_fraction",),
}


@dataclass(frozen=True)
class Estimate:
    """An unknown of a law and its interval, as measured: below 0 means faster than ideal."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A law fitted to one curve."""

    law: str
    estimates: tuple[Estimate, ...]
    sizes: tuple[int, ...]  # world sizes that were measured
    r_squared: float  # of the rates' logarithms; 1: a perfect fit
    worst: float  # the largest relative error of a size's median
    rate_one: float  # c, images per second
    noise: float  # the relative standard error of one run
    freedom: int  # runs - unknowns


def fit(law: str, sizes: Sequence[int], rates: Sequence[float]) -> Fit:
    """Fit a law to the runs of one curve.

    Raises UsageError where the sizes are too few: a law of k unknowns fits any k sizes, and only
    one more size can tell whether it is right.
    """
    names, different = LAWS[law], sorted(set(sizes))
    if len(different) < len(names) + 2:
        raise UsageError(
            f"{law}: {len(names) + 2} different sizes are needed, and {len(different)} measured"
        )
    n, x = np.asarray(sizes, float), np.asarray(rates, float)
    target = x if law == "gustafson" else n / x
    scaled = _features(law, n) / target[:, None]  # relative errors: every target is 1
    theta, *_ = np.linalg.lstsq(scaled, np.ones_like(target), rcond=None)
    residual = 1 - scaled @ theta
    freedom = len(target) - len(theta)
    noise = math.sqrt(float(residual @ residual) / freedom)
    covariance = noise**2 * np.linalg.pinv(scaled.T @ scaled)
    r_squared, worst = _goodness(n, x, _predicted(law, n, theta))
    rate_one = float(theta[0]) if law == "gustafson" else 1 / float(theta[0])
    found = _estimates(law, names, theta, covariance, freedom)
    sizes_of = tuple(different)
    return Fit(law, found, sizes_of, r_squared, worst, rate_one, noise, freedom)


def best(scaling: str, sizes: Sequence[int], rates: Sequence[float]) -> list[Fit]:
    """The laws that can be fitted to a curve, those first whose unknowns are all losses."""
    laws = ("gustafson", "usl") if scaling == "weak" else ("usl", "amdahl")
    different = len(set(sizes))
    fits = [fit(law, sizes, rates) for law in laws if different >= len(LAWS[law]) + 2]
    return sorted(fits, key=lambda f: any(e.value < 0 for e in f.estimates))


def _features(law: str, n: Values) -> Values:
    """The factors of the linear unknowns, one row per size."""
    ones = n if law == "gustafson" else np.ones_like(n)
    columns = {"amdahl": [n - 1], "usl": [n - 1, n * (n - 1)], "gustafson": [-(n - 1)]}
    return np.stack([ones, *columns[law]], axis=1)


def _predicted(law: str, n: Values, theta: Values) -> Values:
    value = _features(law, n) @ theta
    return np.asarray(value if law == "gustafson" else n / value)


def _estimates(
    law: str, names: Sequence[str], theta: Values, covariance: Values, freedom: int
) -> tuple[Estimate, ...]:
    """The unknowns as the law names them: theta[i] / theta[0], by the delta method."""
    made = []
    for i, name in enumerate(names, start=1):
        value = float(theta[i] / theta[0])
        gradient = np.zeros_like(theta)
        gradient[0], gradient[i] = -value / theta[0], 1 / theta[0]
        width = quantile(freedom, CONFIDENCE) * math.sqrt(float(gradient @ covariance @ gradient))
        made.append(Estimate(name, value, value - width, value + width))
    return tuple(made)


def _goodness(n: Values, measured: Values, predicted: Values) -> tuple[float, float]:
    """R squared of the logarithms, and the largest relative error of a size's median."""
    with np.errstate(invalid="ignore", divide="ignore"):  # a fitted rate may be below 0
        miss = np.log(measured) - np.log(predicted)
    total = np.log(measured) - np.log(measured).mean()
    r_squared = 1 - float(miss @ miss) / float(total @ total) if total.any() else math.nan
    worst = max(abs(math.expm1(float(np.median(miss[n == size])))) for size in np.unique(n))
    return r_squared, worst
