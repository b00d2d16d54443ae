"""Predictions for sizes beyond the measured ones: laws averaged by how well they predict.

The laws are in laws.py. Beyond the measured sizes a slower level of the network may begin that
nothing names, at each doubling with a small probability, and costs an exponential loss. A
prediction is never above ideal scaling from the smallest size and the gain that was measured: that
of the law, or of a size that is faster per rank than the smallest by more than chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jobkit.analysis.scaling.laws import GAIN, PRIORS, SIGMA, TAU, Places, Priors, Values, shapes
from jobkit.analysis.scaling.posterior import Curve, levels, sampled
from jobkit.errors import UsageError

LEAST = 3  # sizes
WIDEST = 4.0  # upper / lower end of an interval that is still a forecast
_SHARE = 0.95  # of the draws, in an interval
_ABOVE = 1.96  # standard deviations of one run's noise that an interval reaches above ideal
# Of it so much counts, or what repeats of a size show: what no law explains may be taken for noise.
_MOST_NOISE = 0.05
_CHANCE = 3.0  # standard errors by which a rate per rank is above another by more than chance


@dataclass(frozen=True)
class Prediction:
    """Draws from what is known about one curve. Arrays have the shape (draws,)."""

    places: Places  # what was measured
    priors: Priors
    points: Values  # (draws, laws.COUNT)
    base: Values  # log rate per rank at the smallest size
    last: Values  # the level at the largest size
    normal: Values  # (draws, 2): of the walk beyond, of one run's noise
    uniform: Values  # whether, and how much, a new level of the network costs
    jump: float = 0.0  # of the best measured size above the smallest, as a logarithm; 0: by chance
    noise: float = 0.0  # standard deviation of the repeats of a size; 0: not known

    def rate(self, ranks: float) -> float:
        """The median prediction of the rate on that many ranks."""
        return float(np.exp(np.median(self._log_rate(ranks))))

    def interval(self, ranks: float) -> tuple[float, float]:
        """The 95 % prediction interval of the rate of one more run: the shortest one."""
        ideal = float(np.median(self.base + self._gained(ranks))) + math.log(ranks)
        return self._ends(self._log_rate(ranks), ideal)

    def speed_up(self, ranks: float) -> tuple[float, float, float]:
        """The speed-up over the smallest size: median and the ends of its interval."""
        ratio = self._log_rate(ranks) - self.base - math.log(self.places.sizes[0])
        ideal = float(np.median(self._gained(ranks))) + math.log(ranks / self.places.sizes[0])
        return float(np.exp(np.median(ratio))), *self._ends(ratio, ideal)

    def refused(self, ranks: int) -> str:
        """Why there is no prediction for that many ranks; empty where there is one."""
        # The speed-up is shown beside the rate, and has the doubt of the smallest size too.
        ends = {"the rate": self.interval(ranks), "the speed-up": self.speed_up(ranks)[1:]}
        factors = {name: high / low for name, (low, high) in ends.items()}
        widest = max(factors, key=lambda name: factors[name])
        if factors[widest] <= WIDEST:
            return ""
        return (
            f"the 95 % interval of a forecast to {ranks} ranks spans a factor of "
            f"{factors[widest]:,.1f} for {widest} (at most {WIDEST:g}): measure larger sizes, or "
            "more repeats"
        )

    def _ends(self, found: Values, ideal: float) -> tuple[float, float]:
        """Of the shortest interval with 95 % of the draws, and the median in any case.

        Above ideal it reaches no farther than the noise of a run.
        """
        sigma = np.exp(self.points[:, SIGMA])
        noise = min(float(np.median(sigma)), max(_MOST_NOISE, self.noise))
        seen = np.sort(np.minimum(found + sigma * self.normal[:, 1], ideal + _ABOVE * noise))
        count = math.ceil(_SHARE * len(seen))
        low = int(np.argmin(seen[count - 1 :] - seen[: len(seen) - count + 1]))
        middle = float(np.median(found))
        return math.exp(min(seen[low], middle)), math.exp(max(seen[low + count - 1], middle))

    def _log_rate(self, ranks: float) -> Values:
        """Draws of the logarithm of the rate, without the noise of a run."""
        sizes, tau = self.places.sizes, np.exp(self.points[:, TAU])
        doublings = max(0.0, math.log2(ranks / sizes[-1]))
        level = self.last + tau * math.sqrt(doublings) * self.normal[:, 0]
        found = level + shapes(self.points, self.places, ranks)
        best = np.minimum(found, self.base + self._gained(ranks))
        return np.asarray(best - self._new_level(doublings) + math.log(ranks))

    def _gained(self, ranks: float) -> Values:
        """Draws of how far a super-linear curve is above ideal, as a logarithm."""
        sizes = self.places.sizes
        doublings = math.log2(min(ranks, sizes[-1]) / sizes[0])
        return np.maximum(np.exp(self.points[:, GAIN]) * doublings, self.jump)

    def _new_level(self, doublings: float) -> Values:
        """Draws of the loss to a level of the network that no measured size has seen."""
        known = self.places.per_node is not None
        once = self.priors.new_level_known if known else self.priors.new_level
        chance = 1 - (1 - once) ** doublings
        # A uniform number below the chance is a loss; the smaller, the larger.
        return self.priors.new_loss * np.log(np.maximum(1.0, chance / self.uniform))


def predict(
    sizes: Sequence[int],
    rates: Sequence[float],
    per_node: int | None = None,
    nodes: Mapping[int, int] | None = None,
    priors: Priors = PRIORS,
) -> Prediction:
    """The prediction from the runs of one curve: the size and the rate of each.

    per_node: ranks of a full node; None: not known, and every size is on one node. nodes: of each
    size; default: as few as possible. Raises UsageError for fewer than three different sizes and
    for a rate that is no number above 0.
    """
    different = sorted(set(sizes))
    if len(different) < LEAST:
        raise UsageError(f"{LEAST} different sizes are needed, and {len(different)} measured")
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError("a rate that is no number above 0 has no forecast")
    measured = tuple(nodes[n] for n in different) if nodes else ()
    places = Places(tuple(different), per_node, measured)
    curve = Curve.of(sizes, rates, places)
    generator = np.random.default_rng(0)  # the same runs give the same forecast
    points = sampled(curve, priors, generator)
    base, last = levels(curve, points, generator)
    return Prediction(
        places=places,
        priors=priors,
        points=points,
        base=base,
        last=last,
        normal=generator.standard_normal((len(points), 2)),
        uniform=1 - generator.random(len(points)),
        jump=_jump(curve, float(np.exp(np.median(points[:, SIGMA])))),
        noise=math.sqrt(curve.squares / freedom) if (freedom := len(rates) - len(different)) else 0,
    )


def _jump(curve: Curve, sigma: float) -> float:
    """By how much the fastest size per rank is above the smallest, as a logarithm; 0 by chance.

    sigma: standard deviation of one run.
    """
    best = int(np.argmax(curve.means))
    above = float(curve.means[best] - curve.means[0])
    error = sigma * math.sqrt(1 / curve.counts[best] + 1 / curve.counts[0])
    return above if above > _CHANCE * error else 0.0
