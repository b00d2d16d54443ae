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
hides it; all in units of the compute of a step at N0. In strong scaling that part shrinks, and
communication surfaces that no measured size shows. Where the links were measured and the messages
of a step are known, their time takes the place of q and e, times a factor near 1. A random walk
over log2 N, with a standard deviation of tau per doubling, stands for deviations from every law,
sigma for the noise of a run.

A prediction is an average over the family. Points are drawn by adaptive importance sampling (Cappe
et al., JCGS 13, 2004) with the weight that the measured runs give them. Priors are wide, so that
what the runs do not show counts as nothing or as much as is possible, each with its weight. Those
of strong scaling are of communication of 0.2 to 16 % of a step on one rank (95 %); those of weak
scaling were chosen by published tables (tests/bench/published.csv).
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from jobkit.errors import UsageError

Values = NDArray[np.float64]
Ends = tuple[float, float, float]  # the median, and the ends of the 95 % interval

MIN_SIZES = 3
MAX_FACTOR = 4.0  # upper / lower end of an interval that is still a forecast
SHARE = 0.95  # of the draws, in an interval
DRAWS, ROUNDS = 4000, 4
FREEDOM = 5  # of Student's t of the proposals
FLAT = 100.0  # variance of the level at the smallest size before it was measured

# The columns of a point. Logarithms with bounds, two shares of 0 to 1, and normal logarithms.
GAIN, GAIN_END, HIDDEN, RING, NODES, SIGMA, TAU = range(4, 11)  # after a, b, c and r
BOUNDED = 7
LOW = np.array([*np.log([1e-5, 1e-8, 1e-4, 1e-4, 1e-5]), 0, 0])
HIGH = np.array([*np.log([0.3, 0.01, 0.15, 0.4, 0.1]), 1, 1])
# Median and spread (of the logarithm) of q, of e (strong: of e / q), sigma and tau. With known
# links q is what communication takes in a step over what it took alone.
STRONG = np.log([0.018, 2.0, 0.025, 0.008]), np.array([1.1, 0.9, 0.6, 0.9])
WEAK = np.log([0.03, 0.16, 0.025, 0.008]), np.array([1.3, 1.0, 0.6, 0.9])
KNOWN = np.log([1.0, 2.0, 0.025, 0.008]), np.array([0.3, 0.9, 0.6, 0.9])
# Of the share HIDDEN so much says that nothing is hidden; the rest is spread up to MAX_HIDDEN of a
# step (the backward pass is two thirds of it).
NOTHING_HIDDEN, MAX_HIDDEN = 0.35, 0.8
# A second node costs more where communication within one does: e grows as this power of the loss
# over a full node (published tables, weak scaling), relative to a loss of 5 %.
NODE_POWER, TYPICAL_LOSS, SMALL_LOSS = 0.6, 0.05, 0.01
# A slower level of the network that no measured size has seen: its probability at each doubling
# beyond them, half of it where the nodes are known, and its mean loss (logarithm).
NEW_LEVEL, NEW_LOSS = 0.06, 0.2
MAX_NOISE = 0.05  # of the noise so much counts above ideal, or what repeats of a size show
ABOVE = 1.96  # standard deviations of one run that an interval reaches above ideal
BY_CHANCE = 3.0  # standard errors by which one size's rate per rank may be above another's


class Prediction:
    """Draws of what the runs of one curve, the size and the rate of each, say of other sizes.

    scaling: strong or weak. per_node: ranks of a full node; None: not known, and every size is on
    one node. sent: the time of the messages of a step at a size, over the time of a step at the
    smallest one, where links were measured. nodes: of each measured size; default: as few as
    possible. Raises UsageError for fewer than three different sizes and for a rate that is no
    number above 0.
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
        different = sorted(set(sizes))
        if len(different) < MIN_SIZES:
            found = f"(measured: {', '.join(map(str, different)) or 'none'})"
            raise UsageError(f"{MIN_SIZES} different sizes are needed for a fit {found}")
        if not all(0 < rate < math.inf for rate in rates):
            raise UsageError("a rate that is no number above 0 has no forecast")
        per_rank = np.log(rates) - np.log(sizes)
        groups = [per_rank[np.asarray(sizes) == size] for size in different]
        self.sizes, self.strong, self.per_node, self.sent = (
            different,
            scaling != "weak",
            per_node,
            sent,
        )
        self.nodes = dict(nodes or {})
        self.doublings = np.log2(np.asarray(different) / different[0])
        self.counts = np.asarray([len(group) for group in groups], float)
        self.means = np.asarray([group.mean() for group in groups])
        self.squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        self.freedom = int(self.counts.sum()) - len(groups)
        generator = np.random.default_rng(0)  # the same runs give the same forecast
        self._points = self._posterior(generator)
        self._normal = generator.standard_normal((DRAWS, 3))
        self._uniform = 1 - generator.random(DRAWS)

    def rate(self, ranks: float) -> Ends:
        """The rate of one more run on that many ranks, with the shortest interval."""
        found, base, gained = self._draws(ranks)
        return self._ends(found, float(np.median(base + gained)), ranks)

    def speed_up(self, ranks: float) -> Ends:
        """The speed-up over the smallest size."""
        found, base, gained = self._draws(ranks)
        return self._ends(found - base, float(np.median(gained)), ranks / self.sizes[0])

    def refused(self, ranks: int) -> str:
        """Why there is no prediction for that many ranks; empty where there is one."""
        # The speed-up is shown beside the rate, and has the doubt of the smallest size too.
        shown = {"the rate": self.rate(ranks), "the speed-up": self.speed_up(ranks)}
        factor, name = max((high / low, name) for name, (_, low, high) in shown.items())
        if factor <= MAX_FACTOR:
            return ""
        return (
            f"the 95 % interval of a forecast to {ranks} ranks spans a factor of {factor:,.1f} for "
            f"{name} (at most {MAX_FACTOR:g}): measure larger sizes, or more repeats"
        )

    def _nodes_of(self, ranks: float) -> int:
        fewest = math.ceil(ranks / (self.per_node or ranks))
        return self.nodes.get(int(ranks), fewest) if ranks == int(ranks) else fewest

    def _shape(self, points: Values, ranks: float) -> Values:
        """Log efficiency over the smallest size by each point's law, of shape (points,)."""
        base, m = self.sizes[0], ranks / self.sizes[0]
        first, nodes = self._nodes_of(base), self._nodes_of(ranks)
        q, e = np.exp(points[:, [RING, NODES]]).T
        if self.strong:
            e = e * q
        elif nodes > first:
            full, within = (self.per_node or 0) / base, np.full(len(points), TYPICAL_LOSS)
            if full > 1:
                within = _own_loss(points, full) + q * (1 - 1 / full)
            e = e * ((within + SMALL_LOSS) / (TYPICAL_LOSS + SMALL_LOSS)) ** NODE_POWER
        hidden = np.maximum(0, points[:, HIDDEN] - NOTHING_HIDDEN) / (1 - NOTHING_HIDDEN)
        hidden = hidden * MAX_HIDDEN * (self.strong or bool(self.sent))

        def exposed(n: float, k: int, u: float) -> Values:
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
        found = -0.5 * (white**2).sum(1) - np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)
        log_sigma = points[:, SIGMA]
        spread = 0.5 * self.squares * np.exp(-2 * log_sigma)
        return np.asarray(found - self.freedom * log_sigma - spread)

    def _posterior(self, generator: np.random.Generator) -> Values:
        """Points of the family, as likely as the runs make them, of shape (DRAWS, 11).

        The first proposal is the prior, each next one Student's t about what weighed most so far;
        all draws are weighed by the mixture of all proposals.
        """
        middle, spread = KNOWN if self.sent else STRONG if self.strong else WEAK

        def log_prior(points: Values) -> Values:
            bounded = points[:, :BOUNDED]
            inside = ((bounded >= LOW) & (bounded <= HIGH)).all(axis=1)
            normal = -0.5 * (((points[:, BOUNDED:] - middle) / spread) ** 2).sum(axis=1)
            constant = np.log(HIGH - LOW).sum() + np.log(spread * math.sqrt(2 * math.pi)).sum()
            return np.where(inside, normal, -np.inf) - constant

        bounded = LOW + (HIGH - LOW) * generator.random((DRAWS, BOUNDED))
        normal = middle + spread * generator.standard_normal((DRAWS, len(middle)))
        points = np.hstack([bounded, normal])
        heights = self._log_likelihood(points)
        weights = _normalised(0.5 * heights)  # flatter: the prior has few points where the runs are
        densities = [log_prior(points)]  # of each proposal, at all points so far
        target, proposals = heights + densities[0], list[tuple[Values, Values]]()
        for _ in range(ROUNDS):
            mean = weights @ points
            apart = points - mean
            covariance = 1.3 * (apart * weights[:, None]).T @ apart + 1e-4 * np.eye(len(mean))
            root = np.linalg.cholesky(covariance)
            proposals.append((mean, root))
            normal = generator.standard_normal((DRAWS, len(mean)))
            scale = np.sqrt(generator.chisquare(FREEDOM, (DRAWS, 1)) / FREEDOM)
            new = mean + normal / scale @ root.T
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
        # Levels at the size and at the smallest one, given the measured sizes: jointly normal.
        across = tau2[:, None] * np.minimum(d, far) + FLAT
        flat = np.full_like(across, FLAT)
        solved = np.linalg.solve(covariance, np.stack([rest, across, flat], axis=-1))
        (mean, base_mean), (lost, both) = (
            ((across * s).sum(1), (flat * s).sum(1)) for s in (solved[..., 0], solved[..., 1])
        )
        base_var = np.maximum(FLAT - (flat * solved[..., 2]).sum(1), 1e-12)
        slope = (FLAT - both) / base_var
        base = base_mean + np.sqrt(base_var) * self._normal[:, 0]
        left = np.maximum(tau2 * far + FLAT - lost - slope * (FLAT - both), 0)
        level = mean + slope * (base - base_mean) + np.sqrt(left) * self._normal[:, 1]
        # A measured size above ideal is a gain that stays, unless chance may have made it.
        best = int(np.argmax(self.means))
        above = float(self.means[best] - self.means[0])
        error = sigma * math.sqrt(1 / self.counts[best] + 1 / self.counts[0])
        gained = np.exp(points[:, GAIN]) * points[:, GAIN_END] * d[-1]
        gained = np.maximum(gained, above if above > BY_CHANCE * error else 0.0)
        found = np.minimum(level + self._shape(points, ranks), base + gained)
        # The loss to a new level where a number is below its chance; the smaller, the larger.
        once, doublings = NEW_LEVEL / (2 if self.per_node else 1), math.log2(ranks / self.sizes[-1])
        chance = 1 - (1 - once) ** max(0.0, doublings)
        found -= NEW_LOSS * np.log(np.maximum(1.0, chance / self._uniform))
        return found + self.means[0], base + self.means[0], gained

    def _ends(self, found: Values, ideal: float, scale: float) -> Ends:
        """The median, and the shortest interval with 95 % of the draws about it.

        Above ideal it reaches no farther than the noise of a run.
        """
        sigma = np.exp(self._points[:, SIGMA])
        seen_noise = math.sqrt(self.squares / self.freedom) if self.freedom else 0.0
        noise = min(float(np.median(sigma)), max(MAX_NOISE, seen_noise))
        seen = np.sort(np.minimum(found + sigma * self._normal[:, 2], ideal + ABOVE * noise))
        count = math.ceil(SHARE * len(seen))
        first = int(np.argmin(seen[count - 1 :] - seen[: len(seen) - count + 1]))
        middle = float(np.median(found))
        ends = middle, min(seen[first], middle), max(seen[first + count - 1], middle)
        value, low, high = (math.exp(end) * scale for end in ends)
        return value, low, high


def _own_loss(points: Values, m: float) -> Values:
    a, b, c, r = np.exp(points[:, :GAIN]).T
    return np.asarray(a * (m - 1) + b * m * (m - 1) + c * math.log2(m) + r * (1 - 1 / m))


def _log_student(points: Values, mean: Values, root: Values) -> Values:
    """The density of a proposal; that a point may come by reflection too is left out."""
    count = len(mean)
    distance = (np.linalg.solve(root, (points - mean).T) ** 2).sum(axis=0)
    constant = math.lgamma((FREEDOM + count) / 2) - math.lgamma(FREEDOM / 2)
    constant -= count / 2 * math.log(FREEDOM * math.pi) + np.log(np.diag(root)).sum()
    return np.asarray(constant - (FREEDOM + count) / 2 * np.log1p(distance / FREEDOM))


def _normalised(log_weights: Values) -> Values:
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())
