"""Predictions for sizes beyond the measured ones: laws averaged by how well they predict.

With m = N / (smallest measured size), a law is any point of this family (rate per rank falls):

    log(X(N) / N) = level(N) + gain x min(log2 m, log2 m_max) - log(1 + loss(m))
    loss(m) = a (m - 1) + b m (m - 1) + c log2 m + r (1 - 1 / m)

a: serial fraction (Amdahl), b: coherency (Gunther), c: what each doubling loses, as in a tree, r:
ring all-reduce and other losses that set in at once; gain: super-linear up to the largest measured
size, no further. level is a random walk over log2 N: deviations from every law, with a standard
deviation of tau per doubling. The coefficients have log-uniform priors, so that what the measured
sizes do not show counts as nothing or as much as is possible, each with its weight. Beyond the
measured sizes a new level of the network may begin, at each doubling with a small probability, and
costs an exponential loss.

The posterior is sampled (affine-invariant ensemble, Goodman and Weare, CAMCoS 5, 2010); the level
is integrated out by a Kalman filter. A prediction is never above ideal scaling from the smallest
size and the gain that was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobkit.errors import UsageError

Values = NDArray[np.float64]
LEAST = 3  # sizes
WIDEST = 4.0  # upper / lower end of an interval that is still a forecast
# Bounds of the log-uniform priors of a, b, c, r and gain; b's density falls as b**-0.15, because
# most curves have none.
_LOW = np.log([1e-6, 1e-10, 1e-5, 1e-5, 1e-5])
_HIGH = np.log([0.5, 0.05, 0.3, 1.0, 0.12])
_TILT = np.array([0, 0.15, 0, 0, 0])
# Median and spread (of the logarithm) of sigma, the noise of one run, and of tau.
_MIDDLE, _SPREAD = np.log([0.025, 0.01]), np.array([0.6, 1.0])
_NEW_LEVEL, _LOSS = 0.08, 0.2  # of a new level: probability per doubling, mean loss (logarithm)
_WALKERS, _STEPS, _KEPT, _PRIOR_DRAWS = 300, 60, 6, 6000


@dataclass(frozen=True)
class Prediction:
    """Draws from what is known about one curve. Arrays have the shape (draws,)."""

    sizes: tuple[int, ...]  # that were measured, in ranks
    coefficients: Values  # (draws, 5): a, b, c, r, gain
    sigma: Values
    tau: Values
    base: Values  # log rate per rank at the smallest size
    last: Values  # the level at the largest size
    normal: Values  # (draws, 2): of the walk beyond, of one run's noise
    uniform: Values  # whether, and how much, a new level of the network costs

    def rate(self, ranks: float) -> float:
        """The median prediction of the rate on that many ranks."""
        return float(np.exp(np.median(self._log_rate(ranks))))

    def interval(self, ranks: float) -> tuple[float, float]:
        """The 95 % prediction interval of the rate of one more run."""
        return self._ends(self._log_rate(ranks))

    def speed_up(self, ranks: float) -> tuple[float, float, float]:
        """The speed-up over the smallest size: median and the ends of its interval."""
        ratio = self._log_rate(ranks) - self.base - math.log(self.sizes[0])
        return float(np.exp(np.median(ratio))), *self._ends(ratio)

    def refused(self, ranks: int) -> str:
        """Why there is no prediction for that many ranks; empty where there is one."""
        low, high = self.interval(ranks)
        if high <= WIDEST * low:
            return ""
        return (
            f"the 95 % interval of a forecast to {ranks} ranks spans a factor of "
            f"{high / low:,.1f} (at most {WIDEST:g}): measure larger sizes, or more repeats"
        )

    def _ends(self, drawn: Values) -> tuple[float, float]:
        """Of 95 % at least: where draws pile up at ideal scaling, most are above their median."""
        seen = drawn + self.sigma * self.normal[:, 1]
        (low, high), middle = np.quantile(seen, [0.025, 0.99]), float(np.median(drawn))
        return math.exp(min(low, middle)), math.exp(max(high, middle))

    def _log_rate(self, ranks: float) -> Values:
        """Draws of the logarithm of the rate, without the noise of a run."""
        doublings = max(0.0, math.log2(ranks / self.sizes[-1]))
        shape = _shape(self.coefficients, ranks / self.sizes[0], self.sizes[-1] / self.sizes[0])
        level = self.last + self.tau * math.sqrt(doublings) * self.normal[:, 0]
        gained = self.coefficients[:, 4] * math.log2(min(ranks, self.sizes[-1]) / self.sizes[0])
        found = np.minimum(level + shape, self.base + gained) - self._new_level(doublings)
        return np.asarray(found + math.log(ranks))

    def _new_level(self, doublings: float) -> Values:
        """Draws of the loss to a level of the network that no measured size has seen."""
        chance = 1 - (1 - _NEW_LEVEL) ** doublings
        # A uniform number below the chance is a loss; the smaller, the larger.
        return _LOSS * np.log(np.maximum(1.0, chance / self.uniform))


def predict(sizes: Sequence[int], rates: Sequence[float]) -> Prediction:
    """The prediction from the runs of one curve: the size and the rate of each.

    Raises UsageError for fewer than three different sizes.
    """
    curve = _Curve.of(sizes, rates)
    if len(curve.sizes) < LEAST:
        raise UsageError(f"{LEAST} different sizes are needed, and {len(curve.sizes)} measured")
    generator = np.random.default_rng(0)  # the same runs give the same forecast
    points = _sampled(curve, generator)
    base, last = _levels(curve, points, generator)
    count = len(points)
    return Prediction(
        sizes=curve.sizes,
        coefficients=np.exp(points[:, :5]),
        sigma=np.exp(points[:, 5]),
        tau=np.exp(points[:, 6]),
        base=base,
        last=last,
        normal=generator.standard_normal((count, 2)),
        uniform=1 - generator.random(count),
    )


@dataclass(frozen=True)
class _Curve:
    """The runs of one curve, size by size."""

    sizes: tuple[int, ...]
    counts: Values  # runs of each size
    means: Values  # of log(rate per rank)
    squares: float  # sum of the squared deviations from the means

    @classmethod
    def of(cls, sizes: Sequence[int], rates: Sequence[float]) -> "_Curve":
        n, y = np.asarray(sizes), np.log(rates) - np.log(sizes)
        different = sorted(set(sizes))
        groups = [y[n == size] for size in different]
        squares = sum(float(((g - g.mean()) ** 2).sum()) for g in groups)
        counts = np.asarray([len(g) for g in groups], float)
        return cls(tuple(different), counts, np.asarray([g.mean() for g in groups]), squares)


def _shape(coefficients: Values, m: float, measured: float) -> Values:
    """Draws of the law's log efficiency at m times the smallest size, without the level."""
    a, b, c, r, gain = coefficients.T
    loss = a * (m - 1) + b * m * (m - 1) + c * math.log2(m) + r * (1 - 1 / m)
    return np.asarray(gain * math.log2(min(m, measured)) - np.log1p(loss))


@dataclass
class _Filter:
    """The level after each size: normal, jointly with the level at the smallest size."""

    last: Values
    base: Values
    last_var: Values
    base_var: Values
    both: Values  # covariance
    log_likelihood: Values


def _filtered(curve: _Curve, points: Values) -> _Filter:
    """The Kalman filter over the sizes, for every point of the ensemble at once."""
    coefficients, (sigma2, tau2) = np.exp(points[:, :5]), np.exp(2 * points[:, 5:7]).T
    first, largest = curve.sizes[0], curve.sizes[-1] / curve.sizes[0]
    variance = sigma2 / curve.counts[0]
    start = np.full(len(points), curve.means[0])
    now = _Filter(start, start, variance, variance, variance, np.zeros(len(points)))
    for i in range(1, len(curve.sizes)):
        step = math.log2(curve.sizes[i] / curve.sizes[i - 1])
        ahead = now.last_var + tau2 * step
        seen = ahead + sigma2 / curve.counts[i]
        found = curve.means[i] - _shape(coefficients, curve.sizes[i] / first, largest)
        surprise = found - now.last
        now = _Filter(
            last=now.last + ahead / seen * surprise,
            base=now.base + now.both / seen * surprise,
            last_var=ahead - ahead**2 / seen,
            base_var=now.base_var - now.both**2 / seen,
            both=now.both - now.both * ahead / seen,
            log_likelihood=now.log_likelihood - 0.5 * (np.log(seen) + surprise**2 / seen),
        )
    return now


def _log_posterior(curve: _Curve, points: Values) -> Values:
    """Up to a constant; -infinity outside the bounds."""
    freedom = curve.counts.sum() - len(curve.counts)
    inside = ((points[:, :5] > _LOW) & (points[:, :5] < _HIGH)).all(axis=1)
    prior = -0.5 * (((points[:, 5:] - _MIDDLE) / _SPREAD) ** 2).sum(axis=1)
    prior -= points[:, :5] @ _TILT
    repeats = -freedom * points[:, 5] - 0.5 * curve.squares * np.exp(-2 * points[:, 5])
    found = prior + repeats + _filtered(curve, points).log_likelihood
    return np.where(inside, found, -np.inf)


def _sampled(curve: _Curve, generator: np.random.Generator) -> Values:
    """Points of the posterior: from the best of many draws of the prior, by stretch moves."""
    uniform = generator.random((_PRIOR_DRAWS, len(_LOW)))
    noise = _MIDDLE + _SPREAD * generator.standard_normal((_PRIOR_DRAWS, 2))
    drawn = np.hstack([_LOW + (_HIGH - _LOW) * uniform, noise])
    weights = _log_posterior(curve, drawn)
    weights += 0.5 * (((noise - _MIDDLE) / _SPREAD) ** 2).sum(axis=1)  # drawn from this prior
    weights = np.exp(weights - weights.max())
    chosen = generator.choice(len(drawn), _WALKERS, p=weights / weights.sum())
    points, kept = drawn[chosen] + 1e-3 * generator.standard_normal((_WALKERS, 7)), []
    inside = points.copy()
    inside[:, :5] = np.clip(points[:, :5], _LOW + 1e-6, _HIGH - 1e-6)
    height = _log_posterior(curve, inside)
    for step in range(_STEPS):
        for half in (slice(0, None, 2), slice(1, None, 2)):
            _stretch(curve, inside, height, half, generator)
        if (step + 1) % (_STEPS // _KEPT) == 0:
            kept.append(inside.copy())
    return np.concatenate(kept)


def _stretch(
    curve: _Curve, points: Values, height: Values, half: slice, generator: np.random.Generator
) -> None:
    """Move half of the points along lines through points of the other half, in place."""
    own = points[half]
    others = np.delete(points, np.arange(len(points))[half], axis=0)
    partners = others[generator.integers(len(others), size=len(own))]
    factor = (1 + generator.random(len(own))) ** 2 / 2  # density 1 / sqrt(z) between 1/2 and 2
    moved = partners + factor[:, None] * (own - partners)
    there = _log_posterior(curve, moved)
    ratio = (own.shape[1] - 1) * np.log(factor) + there - height[half]
    taken = np.log(1 - generator.random(len(own))) < ratio
    points[half] = np.where(taken[:, None], moved, own)
    height[half] = np.where(taken, there, height[half])


def _levels(curve: _Curve, points: Values, generator: np.random.Generator) -> tuple[Values, Values]:
    """Draws of the levels at the smallest and at the largest size."""
    found = _filtered(curve, points)
    normal = generator.standard_normal((2, len(points)))
    base = found.base + np.sqrt(np.maximum(found.base_var, 0)) * normal[0]
    slope = found.both / np.maximum(found.base_var, 1e-300)
    rest = np.maximum(found.last_var - slope * found.both, 0)
    return base, found.last + slope * (base - found.base) + np.sqrt(rest) * normal[1]
