"""Draws of what is known about the laws of one curve after it was measured.

The posterior is sampled (affine-invariant ensemble, Goodman and Weare, CAMCoS 5, 2010), beginning
at the best of many draws of the prior; the level is integrated out by a Kalman filter over sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobkit.analysis.scaling.laws import (
    SIGMA,
    TAU,
    Places,
    Priors,
    Values,
    bounded,
    drawn,
    log_prior,
    shapes,
)

_WALKERS, _STEPS, _KEPT, _PRIOR_DRAWS = 300, 60, 6, 6000


@dataclass(frozen=True)
class Curve:
    """The runs of one curve, size by size."""

    places: Places
    counts: Values  # runs of each size
    means: Values  # of log(rate per rank)
    squares: float  # sum of the squared deviations from the means

    @classmethod
    def of(cls, sizes: Sequence[int], rates: Sequence[float], places: Places) -> "Curve":
        """The curve of runs: the size and the rate of each, and where the sizes are."""
        n, y = np.asarray(sizes), np.log(rates) - np.log(sizes)
        groups = [y[n == size] for size in places.sizes]
        squares = sum(float(((g - g.mean()) ** 2).sum()) for g in groups)
        counts = np.asarray([len(g) for g in groups], float)
        means = np.asarray([g.mean() for g in groups])
        return cls(places, counts, means, squares)


@dataclass
class _Filter:
    """The level after each size: normal, jointly with the level at the smallest size."""

    last: Values
    base: Values
    last_var: Values
    base_var: Values
    both: Values  # covariance
    log_likelihood: Values


def _filtered(curve: Curve, points: Values) -> _Filter:
    """The Kalman filter over the sizes, for every point of the ensemble at once."""
    sigma2, tau2 = np.exp(2 * points[:, [SIGMA, TAU]]).T
    sizes = curve.places.sizes
    variance = sigma2 / curve.counts[0]
    start = np.full(len(points), curve.means[0])
    now = _Filter(start, start, variance, variance, variance, np.zeros(len(points)))
    for i in range(1, len(sizes)):
        ahead = now.last_var + tau2 * math.log2(sizes[i] / sizes[i - 1])
        seen = ahead + sigma2 / curve.counts[i]
        surprise = curve.means[i] - shapes(points, curve.places, sizes[i]) - now.last
        now = _Filter(
            last=now.last + ahead / seen * surprise,
            base=now.base + now.both / seen * surprise,
            last_var=ahead - ahead**2 / seen,
            base_var=now.base_var - now.both**2 / seen,
            both=now.both - now.both * ahead / seen,
            log_likelihood=now.log_likelihood - 0.5 * (np.log(seen) + surprise**2 / seen),
        )
    return now


def _log_likelihood(curve: Curve, points: Values) -> Values:
    freedom = curve.counts.sum() - len(curve.counts)
    log_sigma = points[:, SIGMA]
    repeats = -freedom * log_sigma - 0.5 * curve.squares * np.exp(-2 * log_sigma)
    return np.asarray(repeats + _filtered(curve, points).log_likelihood)


def _log_posterior(curve: Curve, points: Values, priors: Priors) -> Values:
    """Up to a constant; -infinity outside the bounds."""
    return log_prior(points, curve.places, priors) + _log_likelihood(curve, points)


def sampled(curve: Curve, priors: Priors, generator: np.random.Generator) -> Values:
    """Points of the posterior, of shape (draws, laws.COUNT)."""
    before = drawn(_PRIOR_DRAWS, curve.places, priors, generator)
    weights = _log_likelihood(curve, before) - before[:, : len(priors.tilt)] @ priors.tilt
    weights = np.exp(weights - weights.max())
    chosen = before[generator.choice(len(before), _WALKERS, p=weights / weights.sum())]
    apart = 1e-3 * generator.standard_normal(chosen.shape)  # a point may be chosen twice
    points, kept = bounded(chosen + apart, priors), []
    height = _log_posterior(curve, points, priors)
    for step in range(_STEPS):
        for half in (0, 1):
            _stretch(curve, priors, points, height, half, generator)
        if (step + 1) % (_STEPS // _KEPT) == 0:
            kept.append(points.copy())
    return np.concatenate(kept)


def _stretch(
    curve: Curve,
    priors: Priors,
    points: Values,
    height: Values,
    half: int,
    generator: np.random.Generator,
) -> None:
    """Move every second point along lines through points of the other half, in place."""
    own, others = points[half::2], points[1 - half :: 2]
    partners = others[generator.integers(len(others), size=len(own))]
    factor = (1 + generator.random(len(own))) ** 2 / 2  # density 1 / sqrt(z) between 1/2 and 2
    moved = partners + factor[:, None] * (own - partners)
    there = _log_posterior(curve, moved, priors)
    ratio = (own.shape[1] - 1) * np.log(factor) + there - height[half::2]
    taken = np.log(1 - generator.random(len(own))) < ratio
    points[half::2] = np.where(taken[:, None], moved, own)
    height[half::2] = np.where(taken, there, height[half::2])


def levels(curve: Curve, points: Values, generator: np.random.Generator) -> tuple[Values, Values]:
    """Draws of the levels at the smallest and at the largest size."""
    found = _filtered(curve, points)
    normal = generator.standard_normal((2, len(points)))
    base = found.base + np.sqrt(np.maximum(found.base_var, 0)) * normal[0]
    slope = found.both / np.maximum(found.base_var, 1e-300)
    rest = np.maximum(found.last_var - slope * found.both, 0)
    return base, found.last + slope * (base - found.base) + np.sqrt(rest) * normal[1]
