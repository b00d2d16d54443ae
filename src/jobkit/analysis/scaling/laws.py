"""The laws of scaling that a prediction averages over, and how likely each is before measuring.

With m = N / (smallest measured size) and k the nodes of N ranks, a law is any point of this family
(the rate per rank falls):

    log(X(N) / N) = level(N) + gain x min(log2 m, log2 m_max) - log(1 + loss)
    loss = a (m - 1) + b m (m - 1) + c log2 m + r (1 - 1 / m) + e (h(k) - h(k_0))
    h(k) = (1 - k**-s) / (1 - 2**-s)

a: serial fraction (Amdahl), b: coherency (Gunther), c: what each doubling loses, as in a tree, r:
ring all-reduce and other losses that set in at once; gain: super-linear up to the largest measured
size, no further. e: what the second node costs, from which on s says how fast the loss of further
nodes ends: 1 for the bandwidth of a ring over the nodes, large where only the first crossing costs.
level is a random walk over log2 N: deviations from every law, with a standard deviation of tau per
doubling.

a, b, c, r and gain have log-uniform priors, so that what the measured sizes do not show counts as
nothing or as much as is possible, each with its weight. e is larger where communication inside a
node costs more: it has a log-normal prior about a power of the loss over one node, which published
tables give (tests/bench/truth.py --only families).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
# Unknowns of a point, all as logarithms, by their column.
COUNT, GAIN, NODE, SHAPE, SIGMA, TAU = 9, 4, 5, 6, 7, 8
_OVER_NODE = 0.06  # the loss over one node, where the smallest size fills it
_LAWS = 5  # the first columns: a, b, c, r, gain, with bounds


@dataclass(frozen=True)
class Priors:
    """What is believed of the unknowns before any size was measured."""

    # Bounds of the log-uniform priors of a, b, c, r and gain.
    low: tuple[float, ...] = (1e-6, 1e-9, 1e-5, 1e-5, 1e-5)
    high: tuple[float, ...] = (0.5, 0.05, 0.3, 1.0, 0.12)
    tilt: tuple[float, ...] = (0, 0.11, 0, 0, 0)  # the density falls as b**-0.11: few curves have b
    # Median and spread (of the logarithm) of s, of sigma, the noise of one run, and of tau.
    middle: tuple[float, ...] = (1.4, 0.025, 0.01)
    spread: tuple[float, ...] = (0.7, 0.6, 1.0)
    # log e: offset + slope x log(loss over one node + 0.01), and its spread.
    node_offset: float = -1.17
    node_slope: float = 0.39
    node_spread: float = 0.97
    # Of a slower level of the network where the nodes' size is not known: probability per doubling
    # beyond the measured sizes, and mean loss (logarithm). known: where it is.
    new_level: float = 0.08
    new_level_known: float = 0.04
    new_loss: float = 0.2


PRIORS = Priors()


@dataclass(frozen=True)
class Places:
    """The sizes of a curve: how many ranks they are, and on how many nodes."""

    sizes: tuple[int, ...]
    per_node: int | None = None  # ranks of a full node; None: not known, all sizes are on one node
    measured: tuple[int, ...] = ()  # nodes of each size, where they are not as few as possible

    def nodes(self, ranks: float) -> int:
        """How many nodes that many ranks are on."""
        if self.measured and ranks in self.sizes:
            return self.measured[self.sizes.index(int(ranks))]
        return math.ceil(ranks / self.per_node) if self.per_node else 1

    @property
    def crossed(self) -> bool:
        """Whether a measured size is on more nodes than the smallest one."""
        return self.nodes(self.sizes[-1]) > self.nodes(self.sizes[0])


def losses(points: Values, places: Places, ranks: float) -> Values:
    """Draws of the loss at a size, of shape (draws,). points: (draws, COUNT)."""
    m, nodes = ranks / places.sizes[0], places.nodes(ranks)
    a, b, c, r = np.exp(points[:, :GAIN]).T
    found = a * (m - 1) + b * (m * (m - 1)) + c * math.log2(m) + r * (1 - 1 / m)
    first = places.nodes(places.sizes[0])
    if nodes > first:
        s = np.exp(points[:, SHAPE])
        crossed = (first**-s - nodes**-s) / (1 - 2.0**-s)
        found = found + np.exp(points[:, NODE]) * crossed
    return np.asarray(found)


def shapes(points: Values, places: Places, ranks: float) -> Values:
    """Draws of the law's log efficiency at a size, without the level."""
    gained = math.log2(min(ranks, places.sizes[-1]) / places.sizes[0])
    return np.asarray(np.exp(points[:, GAIN]) * gained - np.log1p(losses(points, places, ranks)))


def node_centers(points: Values, places: Places, priors: Priors) -> Values:
    """The prior median of log e of each point."""
    over_node = np.full(len(points), _OVER_NODE)
    if places.per_node and places.nodes(places.sizes[0]) == 1 and places.per_node > places.sizes[0]:
        over_node = losses(points, places, places.per_node)
    return np.asarray(priors.node_offset + priors.node_slope * np.log(over_node + 0.01))


def log_prior(points: Values, places: Places, priors: Priors) -> Values:
    """Up to a constant; -infinity outside the bounds."""
    low, high = np.log(priors.low), np.log(priors.high)
    laws = points[:, :_LAWS]
    inside = ((laws > low) & (laws < high)).all(axis=1)
    rest = (points[:, SHAPE:] - np.log(priors.middle)) / priors.spread
    node = (points[:, NODE] - node_centers(points, places, priors)) / priors.node_spread
    found = -0.5 * ((rest**2).sum(axis=1) + node**2) - laws @ np.asarray(priors.tilt)
    return np.where(inside, found, -np.inf)


def drawn(count: int, places: Places, priors: Priors, generator: np.random.Generator) -> Values:
    """Points of the prior without its tilt, of shape (count, COUNT)."""
    points = np.empty((count, COUNT))
    low, high = np.log(priors.low), np.log(priors.high)
    points[:, :_LAWS] = low + (high - low) * generator.random((count, _LAWS))
    normal = generator.standard_normal((count, 4))
    points[:, SHAPE:] = np.log(priors.middle) + np.asarray(priors.spread) * normal[:, 1:]
    centers = node_centers(points, places, priors)
    points[:, NODE] = centers + priors.node_spread * normal[:, 0]
    return points


def bounded(points: Values, priors: Priors) -> Values:
    """The points, moved inside the bounds."""
    laws = np.clip(points[:, :_LAWS], np.log(priors.low) + 1e-6, np.log(priors.high) - 1e-6)
    return np.hstack([laws, points[:, _LAWS:]])
