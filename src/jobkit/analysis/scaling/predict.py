"""Predictions for sizes beyond the measured ones: one family of laws, told strong from weak.

With m = N / N0 (N0: the smallest measured size), k nodes and u = m in strong scaling, where each
rank's compute shrinks and a time that stays counts for more, and u = 1 in weak scaling, the rate
per rank X(N) / N falls from its value at N0 by

    log(1 + own + exposed) - gain x min(log2 m, its end)

    own     = a (m - 1) + b m (m - 1) + c log2 m + r (1 - 1 / m)
    exposed = what max(0, u (q (1 - 1 / N) + e (1 - 1 / k)) - o) has more at N than at N0

a: serial fraction (Amdahl), b: coherency (Gunther), c: what each doubling loses, r: losses that
set in at once; q: a ring all-reduce over the ranks (2 (N - 1) / N of the gradients pass each link:
Patarasuk and Yuan, JPDC 69, 2009), e: what it costs between nodes, o: the part of the compute that
hides it, which shrinks in strong scaling, so that communication surfaces that no measured size
shows; all in units of the compute of a step at N0. Where links were measured and the messages of a
step are known, their time takes the place of q and e, times a factor near 1. A random walk over
log2 N, tau per doubling, stands for deviations from every law, sigma for the noise of a run.

A prediction is an average over the family, with the weight that the measured runs give each of its
points. Priors are wide: in strong scaling communication takes 0.2 to 16 % of a step on one rank
(95 %); those of weak scaling were chosen by tests/bench/published.csv.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobkit.errors import UsageError

Values = NDArray[np.float64]
Ends = tuple[float, float, float]  # the median, and the ends of the 95 % interval

MIN_SIZES = 3
MAX_FACTOR = 3.0  # upper / lower end of an interval that is still a forecast
SHARE = 0.95  # of the draws, in an interval
DRAWS, ROUNDS = 4000, 8
FREEDOM = 5  # of Student's t of the proposals
FLAT = 100.0  # variance of the level at the smallest size before it was measured

# The columns of a point. Logarithms with bounds, two shares of 0 to 1, and normal logarithms.
GAIN, GAIN_END, HIDDEN, RING, NODES, SIGMA, TAU, PER_NODE = range(4, 12)  # after a, b, c and r
BOUNDED = 7
LOW = np.array([*np.log([1e-5, 1e-8, 1e-4, 1e-4, 1e-5]), 0, 0])
HIGH = np.array([*np.log([0.3, 0.01, 0.15, 0.4, 0.1]), 1, 1])
# Median and spread (of the logarithm) of q (with known links: of what communication takes in a step
# over what it took alone), e (strong: e / q), sigma, tau, and the ranks of a node if not known.
STRONG = np.log([0.018, 2.0, 0.025, 0.008, 8]), np.array([1.1, 0.9, 0.6, 0.9, 0.8])
WEAK = np.log([0.03, 0.16, 0.025, 0.008, 8]), np.array([1.3, 1.0, 0.6, 0.9, 0.8])
KNOWN = np.log([1.0, 2.0, 0.025, 0.008, 8]), np.array([0.3, 0.9, 0.6, 0.9, 0.8])
# So much of the share HIDDEN says that nothing is hidden; the rest is up to MAX_HIDDEN of a step.
NOTHING_HIDDEN, MAX_HIDDEN = 0.35, 0.8
# A second node costs more where communication within one does: e grows as this power of the loss
# over a full node (published tables, weak scaling), relative to a loss of 5 %.
NODE_POWER, TYPICAL_LOSS, SMALL_LOSS = 0.6, 0.05, 0.01
MAX_NOISE = 0.05  # of the noise so much counts above ideal, or what repeats of a size show
ABOVE = 1.96  # standard deviations of one run that an interval reaches above ideal
BY_CHANCE = 3.0  # standard errors by which one size's rate per rank may be above another's


class Prediction:
    """Draws of what the runs of one curve, the size and the rate of each, say of other sizes.

    per_node: ranks of a full node; None: not known, and every size is on one node. sent: the time
    of a step's messages at a size over that of a step at the smallest one, where links were
    measured. nodes: of the sizes that are known; default: the fewest. rates: above 0, finite.
    Raises UsageError for fewer than three different sizes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rates: Sequence[float],
        scaling: str = "strong",
        per_node: int | None = None,
        sent: Callable[[float], float] | None = None,
        nodes: Mapping[int, int] | None = None,
    ) -> None:
        self.sizes, self.strong = sorted(set(sizes)), scaling != "weak"
        self.per_node, self.sent, self.nodes = per_node, sent, nodes or {}
        if len(self.sizes) < MIN_SIZES:
            measured = f"(measured: {', '.join(map(str, self.sizes))})"
            raise UsageError(f"{MIN_SIZES} different sizes are needed for a fit {measured}")
        per_rank = np.log(rates) - np.log(sizes)
        groups = [per_rank[np.asarray(sizes) == size] for size in self.sizes]
        self.doublings = np.log2(np.asarray(self.sizes) / self.sizes[0])
        self.counts = np.asarray([len(group) for group in groups], float)
        self.means = np.asarray([group.mean() for group in groups])
        self.squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        self.freedom = len(per_rank) - len(groups)
        generator = np.random.default_rng(0)  # the same runs give the same forecast
        self._points = self._posterior(generator)
        self._normal = generator.standard_normal((DRAWS, 3))

    def rate(self, ranks: float) -> Ends:
        """The rate of one more run on that many ranks, with the shortest interval."""
        level, base, gained = self._draws(ranks)
        return self._ends(level, float(np.median(base + gained)), ranks)

    def speed_up(self, ranks: float) -> Ends:
        """The speed-up over the smallest size."""
        level, base, gained = self._draws(ranks)
        return self._ends(level - base, float(np.median(gained)), ranks / self.sizes[0])

    def refused(self, ranks: int) -> str:
        """Why there is no prediction for that many ranks; empty where there is one."""
        # The speed-up is shown beside the rate, and has the doubt of the smallest size too.
        factor = max(high / low for _, low, high in (self.rate(ranks), self.speed_up(ranks)))
        text = f"the 95 % interval of a forecast to {ranks} ranks spans a factor of {factor:,.1f} "
        text += f"(at most {MAX_FACTOR:g}): measure larger sizes, on several nodes too, or more "
        return f"{text}repeats" if factor > MAX_FACTOR else ""

    def _nodes_of(self, points: Values, ranks: float) -> Values | int:
        """How many nodes a size is on; where nobody says it, by each point."""
        if ranks in self.nodes:
            return self.nodes[int(ranks)]
        if self.per_node:
            return math.ceil(ranks / self.per_node)
        largest = max((n for n, on in self.nodes.items() if on == 1), default=1)
        full = np.exp2(np.round(points[:, PER_NODE] / math.log(2)))
        return np.asarray(np.ceil(ranks / np.maximum(full, largest)))

    def _shape(self, points: Values, ranks: float) -> Values:
        """Log efficiency over the smallest size by each point's law, of shape (points,)."""
        base, m = self.sizes[0], ranks / self.sizes[0]
        first, nodes = self._nodes_of(points, base), self._nodes_of(points, ranks)
        q, e = np.exp(points[:, [RING, NODES]]).T
        if self.strong:
            e = e * q
        elif (full := (self.per_node or 0) / base) > 1 and np.any(nodes > first):
            within = _own_loss(points, full) + q * (1 - 1 / full)
            e = e * ((within + SMALL_LOSS) / (TYPICAL_LOSS + SMALL_LOSS)) ** NODE_POWER
        hidden = np.maximum(0, points[:, HIDDEN] - NOTHING_HIDDEN) / (1 - NOTHING_HIDDEN)
        hidden = hidden * MAX_HIDDEN * (self.strong or bool(self.sent))

        def exposed(n: float, k: Values | int, u: float) -> Values:
            all_sent = q * self.sent(n) if self.sent else q * (1 - 1 / n) + e * (1 - 1 / k)
            return np.maximum(0, all_sent * u - hidden)

        more = exposed(ranks, nodes, m if self.strong else 1) - exposed(base, first, 1)
        end = points[:, GAIN_END] * self.doublings[-1]
        gained = np.exp(points[:, GAIN]) * np.minimum(math.log2(m), end)
        return np.asarray(gained - np.log1p(np.maximum(_own_loss(points, m) + more, -0.9)))

    def _residuals(self, points: Values) -> tuple[Values, Values]:
        """Covariance (points, sizes, sizes) of the means, and the means less the law's."""
        d = self.doublings
        sigma2, tau2 = np.exp(2 * points[:, [SIGMA, TAU]]).T[:, :, None, None]
        covariance = tau2 * np.minimum.outer(d, d) + sigma2 * np.diag(1 / self.counts) + FLAT
        law = np.stack([self._shape(points, n) for n in self.sizes], axis=1)
        return covariance, self.means - self.means[0] - law

    def _log_likelihood(self, points: Values) -> Values:
        """Of the runs, for each point, up to a constant."""
        covariance, rest = self._residuals(points)
        root = np.linalg.cholesky(covariance)
        white = np.linalg.solve(root, rest[..., None])[..., 0]
        of_means = -0.5 * (white**2).sum(1) - np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)
        log_sigma = points[:, SIGMA]
        spread = 0.5 * self.squares * np.exp(-2 * log_sigma)
        return np.asarray(of_means - self.freedom * log_sigma - spread)

    def _posterior(self, generator: np.random.Generator) -> Values:
        """Points of the family, as likely as the runs make them, of shape (DRAWS, 12).

        The first are of the prior, each next set is of Student's t about what weighed most so far;
        all are weighed by the mixture that they are drawn from (Cappe et al., JCGS 13, 2004).
        """
        middle, spread = KNOWN if self.sent else STRONG if self.strong else WEAK
        scale = np.append(HIGH - LOW, spread * math.sqrt(2 * math.pi))

        def log_prior(points: Values) -> Values:
            bounded, normal = points[:, :BOUNDED], (points[:, BOUNDED:] - middle) / spread
            inside = ((bounded >= LOW) & (bounded <= HIGH)).all(axis=1)
            return np.where(inside, -0.5 * (normal**2).sum(axis=1), -np.inf) - np.log(scale).sum()

        bounded = LOW + (HIGH - LOW) * generator.random((DRAWS, BOUNDED))
        normal = middle + spread * generator.standard_normal((DRAWS, len(middle)))
        points = np.hstack([bounded, normal])
        densities, proposals = [log_prior(points)], list[tuple[Values, Any]]()
        heights = self._log_likelihood(points)
        target = heights + densities[0]
        weights = _normalised(0.5 * heights)  # flatter: the prior has few points where the runs are
        for _ in range(ROUNDS):
            mean = weights @ points
            covariance = 1.3 * np.cov(points.T, ddof=0, aweights=weights)
            root = np.linalg.cholesky(covariance + 1e-4 * np.eye(len(mean)))
            proposals.append((mean, root))
            normal = generator.standard_normal((DRAWS, len(mean)))
            chi = np.sqrt(generator.chisquare(FREEDOM, (DRAWS, 1)) / FREEDOM)
            new = mean + normal / chi @ root.T
            at = np.mod(new[:, :BOUNDED] - LOW, 2 * (HIGH - LOW))  # reflected at the bounds
            new[:, :BOUNDED] = LOW + np.minimum(at, 2 * (HIGH - LOW) - at)
            points = np.concatenate([points, new])
            target = np.concatenate([target, self._log_likelihood(new) + log_prior(new)])
            densities = [log_prior(points), *(_log_student(points, *p) for p in proposals)]
            weights = _normalised(target - np.logaddexp.reduce(densities, axis=0))
        return points[generator.choice(len(points), DRAWS, p=weights)]

    def _draws(self, ranks: float) -> tuple[Values, Values, Values]:
        """Log rate per rank at that size and at the smallest one, and the gain over ideal."""
        points, d, far = self._points, self.doublings, math.log2(ranks / self.sizes[0])
        covariance, rest = self._residuals(points)
        tau2, sigma = np.exp(2 * points[:, TAU]), float(np.exp(np.median(points[:, SIGMA])))
        # Levels at the smallest size and at this one, given the measured sizes: jointly normal.
        levels = np.full((DRAWS, 2, 2), FLAT)
        levels[:, 1, 1] += tau2 * far
        across = np.full((DRAWS, len(d), 2), FLAT)
        across[:, :, 1] += tau2[:, None] * np.minimum(d, far)
        solved = np.linalg.solve(covariance, np.concatenate([rest[..., None], across], axis=2))
        known = across.transpose(0, 2, 1) @ solved
        root = np.linalg.cholesky(levels - known[..., 1:] + 1e-9 * np.eye(2))
        base, level = (known[..., 0] + (root @ self._normal[:, :2, None])[..., 0]).T
        # A measured size above ideal is a gain that stays, unless chance may have made it.
        best = int(np.argmax(self.means))
        above = float(self.means[best] - self.means[0])
        error = sigma * math.sqrt(1 / self.counts[best] + 1 / self.counts[0])
        gained = np.exp(points[:, GAIN]) * points[:, GAIN_END] * d[-1]
        gained = np.maximum(gained, above if above > BY_CHANCE * error else 0.0)
        level = np.minimum(level + self._shape(points, ranks), base + gained)
        return level + self.means[0], base + self.means[0], gained

    def _ends(self, level: Values, ideal: float, scale: float) -> Ends:
        """The median, and the shortest interval with 95 % of the draws about it.

        Above ideal it reaches no farther than the noise of a run.
        """
        sigma = np.exp(self._points[:, SIGMA])
        seen_noise = math.sqrt(self.squares / self.freedom) if self.freedom else 0.0
        noise = min(float(np.median(sigma)), max(MAX_NOISE, seen_noise))
        seen = np.sort(np.minimum(level + sigma * self._normal[:, 2], ideal + ABOVE * noise))
        count = math.ceil(SHARE * len(seen))
        first = int(np.argmin(seen[count - 1 :] - seen[: len(seen) - count + 1]))
        # A node may end beyond, which only slows down: where nobody says so, that tail is whole.
        lowest = first if self.per_node else min(first, (len(seen) - count) // 2)
        middle = float(np.median(level))
        low, high = min(seen[lowest], middle), max(seen[first + count - 1], middle)
        return scale * math.exp(middle), scale * math.exp(low), scale * math.exp(high)


def _own_loss(points: Values, m: float) -> Values:
    a, b, c, r = np.exp(points[:, :GAIN]).T
    return np.asarray(a * (m - 1) + b * m * (m - 1) + c * math.log2(m) + r * (1 - 1 / m))


def _log_student(points: Values, mean: Values, root: Values) -> Values:
    """The density of a proposal; that a point may come by reflection too is left out."""
    power = (FREEDOM + len(mean)) / 2
    distance = (np.linalg.solve(root, (points - mean).T) ** 2).sum(axis=0)
    constant = math.lgamma(power) - math.lgamma(FREEDOM / 2) - np.log(np.diag(root)).sum()
    constant -= len(mean) / 2 * math.log(FREEDOM * math.pi)
    return np.asarray(constant - power * np.log1p(distance / FREEDOM))


def _normalised(log_weights: Values) -> Values:
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())
