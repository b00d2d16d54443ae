"""The time of one optimizer step, fitted to small sizes and validated on held-out larger ones.

    t(N) = compute(N) + max(0, comm(N) - overlap_share x compute(N))
    compute(N) = fixed_s + per_sample_s x samples of a rank

comm(N) is not fitted: it follows from the messages of the strategy and from the measured links
(spec/traffic.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobkit.errors import UsageError

LEAST = 3  # sizes: two for a fit, one to hold out
_STEPS = 20  # of Gauss and Newton
_NOISE = 1e-3  # relative error of a step below which fits are as good as each other


@dataclass(frozen=True)
class Point:
    """One measured size."""

    ranks: int
    samples: float  # per rank and step
    communication_s: float  # of a step, from the messages and the links
    step_s: float  # measured


@dataclass(frozen=True)
class StepModel:
    """The three unknowns of a step."""

    fixed_s: float
    per_sample_s: float
    overlap_share: float  # of the computation, behind which communication can hide

    def compute_s(self, samples: float) -> float:
        """Seconds of computation with this number of samples on a rank."""
        return self.fixed_s + self.per_sample_s * samples

    def exposed_s(self, samples: float, communication_s: float) -> float:
        """Seconds of exposed communication."""
        return max(0.0, communication_s - self.overlap_share * self.compute_s(samples))

    def step_s(self, p: Point) -> float:
        """Seconds of one step at a size."""
        return self.compute_s(p.samples) + self.exposed_s(p.samples, p.communication_s)


@dataclass(frozen=True)
class HeldOut:
    """A prediction for a size by the fit to smaller ones, and its measurement."""

    fitted: tuple[int, ...]  # ranks
    ranks: int
    predicted_s: float
    measured_s: float

    @property
    def error_share(self) -> float:
        """Above 0: predicted slower than measured."""
        return self.predicted_s / self.measured_s - 1


def fit_steps(points: Sequence[Point]) -> StepModel:
    """The unknowns by least squares, with the same relative error at each size.

    fixed_s needs three sizes and a number of samples that varies (strong scaling); else it is 0
    and counts as time of the samples. Of fits as good as each other the one with the smallest
    overlap is taken: without a size at which nothing is exposed, as one rank, no overlap can be
    told from a faster computation. Raises UsageError for fewer than two sizes.
    """
    if len({p.ranks for p in points}) < 2:
        raise UsageError(f"a step's model needs 2 sizes, and {len(points)} was measured")
    with_fixed = len(points) > 2 and len({p.samples for p in points}) > 1
    ordered = sorted(points, key=lambda p: p.ranks)
    # Unknowns (by number) that may differ from 0: none can be below it.
    free = [[1], [1, 2], *([[0], [0, 2], [0, 1], [0, 1, 2]] if with_fixed else [])]
    hidden = range(len(points) + 1)
    tried = [_descend(ordered, count, unknowns) for unknowns in free for count in hidden]
    misses = [_miss(model, points) for model in tried]
    # Three unknowns can explain three sizes in two ways: noise must not choose between them.
    near = min(misses) + len(points) * _NOISE**2
    best = [m for m, miss in zip(tried, misses, strict=True) if miss <= near]
    return min(best, key=lambda model: model.overlap_share)


def _descend(points: Sequence[Point], hidden: int, free: Sequence[int]) -> StepModel:
    """Gauss and Newton's method, once it is said whose communication is hidden: the first sizes'.

    Communication grows with the ranks, and what can hide it does not. Unknowns not free stay 0.
    """
    samples = np.array([p.samples for p in points])
    steps = np.array([p.step_s for p in points])
    shows = np.arange(len(points)) >= hidden
    sent = np.where(shows, [p.communication_s for p in points], 0.0)
    now = np.zeros(3)
    # A first guess: all of each step is computation.
    now[free[0]] = np.mean(steps / (samples if free[0] else 1.0))
    for _ in range(_STEPS):
        compute, factor = now[0] + now[1] * samples, np.where(shows, 1 - now[2], 1.0)
        slopes = np.stack([factor, factor * samples, np.where(shows, -compute, 0.0)], axis=1)
        slopes = (slopes / steps[:, None])[:, free]
        scale = np.abs(slopes).max(axis=0) + 1e-300  # seconds and shares are not alike
        errors = 1 - (factor * compute + sent) / steps
        change = np.linalg.lstsq(slopes / scale, errors, rcond=1e-9)[0] / scale
        now[free] += change
        now = np.clip(now, 0.0, [np.inf, np.inf, 1.0])
    return StepModel(*map(float, now))


def _miss(model: StepModel, points: Sequence[Point]) -> float:
    """Sum of the squared relative errors."""
    return sum((model.step_s(p) / p.step_s - 1) ** 2 for p in points)


def held_out(points: Sequence[Point]) -> list[HeldOut]:
    """Fit the first two sizes, then three, and so on; predict every larger one each time.

    Raises UsageError for fewer than three sizes: nothing would be left to validate the fit on.
    """
    ordered = sorted(points, key=lambda p: p.ranks)
    if len(ordered) < LEAST:
        raise UsageError(
            f"{LEAST} sizes are needed, two for the fit and one to validate it (measured: "
            f"{', '.join(str(p.ranks) for p in ordered) or 'none'})"
        )
    found = []
    for count in range(2, len(ordered)):
        model = fit_steps(ordered[:count])
        fitted = tuple(p.ranks for p in ordered[:count])
        found += [HeldOut(fitted, p.ranks, model.step_s(p), p.step_s) for p in ordered[count:]]
    return found
