"""The time of one optimizer step on paper, and how well it foretells sizes that were held out.

    t(N) = compute(N) + max(0, comm(N) - overlap(N))
    compute(N) = fixed_s + per_sample_s x samples of a rank
    overlap(N) = overlap_share x compute(N)        communication that hides behind computation

comm(N) is not fitted: it follows from the bytes that a strategy moves and from the latency and
bandwidth of the links (steps_links.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobkit.errors import UsageError

LEAST = 3  # sizes: two for a fit, one to hold out
_STEPS = 200  # of a scan of the overlap; the second one is around the best of the first


@dataclass(frozen=True)
class Point:
    """One measured size."""

    ranks: int
    samples: float  # of a rank in a step
    communication_s: float  # of a step, on paper
    step_s: float  # measured


@dataclass(frozen=True)
class StepModel:
    """The unknowns of a step."""

    fixed_s: float
    per_sample_s: float
    overlap_share: float  # of the computation, behind which communication can hide

    def compute_s(self, samples: float) -> float:
        """Seconds of computation with so many samples on a rank."""
        return self.fixed_s + self.per_sample_s * samples

    def exposed_s(self, samples: float, communication_s: float) -> float:
        """Seconds of communication that nothing hides."""
        return max(0.0, communication_s - self.overlap_share * self.compute_s(samples))

    def step_s(self, samples: float, communication_s: float) -> float:
        """Seconds of one step."""
        return self.compute_s(samples) + self.exposed_s(samples, communication_s)


@dataclass(frozen=True)
class HeldOut:
    """What a fit to the smaller sizes says of a larger one that was measured, too."""

    fitted: tuple[int, ...]  # ranks
    ranks: int
    predicted_s: float
    measured_s: float

    @property
    def error_share(self) -> float:
        """Above 0: predicted slower than measured."""
        return self.predicted_s / self.measured_s - 1


def fit_steps(points: Sequence[Point]) -> StepModel:
    """Fit the unknowns by least squares with the same relative error at each size.

    fixed_s needs three sizes and a number of samples that varies (strong scaling); else it is 0
    and counts as time of the samples. Of overlaps that explain the
    sizes alike the smallest is taken: without a size at which nothing is exposed, as one rank, no
    overlap can be told from a faster computation. Raises UsageError for fewer than two sizes.
    """
    if len({p.ranks for p in points}) < 2:
        raise UsageError(f"a step's model needs 2 sizes, and {len(points)} was measured")
    with_fixed = len(points) > 2 and len({p.samples for p in points}) > 1
    low, high, best = 0.0, 1.0, StepModel(0.0, 0.0, 0.0)
    for _ in range(3):
        shares = np.linspace(low, high, _STEPS + 1)
        tried = [_at_overlap(points, float(share), with_fixed) for share in shares]
        misses = [_miss(model, points) for model in tried]
        least = min(misses)
        # Rounding must not choose among overlaps that explain the sizes alike.
        best = next(m for m, miss in zip(tried, misses, strict=True) if miss <= least + 1e-12)
        width = (high - low) / _STEPS
        low, high = max(0.0, best.overlap_share - width), min(1.0, best.overlap_share + width)
    return best


def _at_overlap(points: Sequence[Point], share: float, with_fixed: bool) -> StepModel:
    """The best computation for one overlap: linear, once it is known whose communication shows."""
    shows = [p.communication_s > 0 for p in points]
    model = StepModel(0.0, 0.0, share)
    for _ in range(len(points) + 1):
        model = _linear(points, share, shows, with_fixed)
        now = [p.communication_s > share * model.compute_s(p.samples) for p in points]
        if now == shows:
            break
        shows = now
    return model


def _linear(
    points: Sequence[Point], share: float, shows: Sequence[bool], with_fixed: bool
) -> StepModel:
    """Least squares for fixed_s and per_sample_s, neither below 0."""
    rows, targets = [], []
    for p, shown in zip(points, shows, strict=True):
        factor = (1 - share if shown else 1.0) / p.step_s
        rows.append([factor, factor * p.samples])
        targets.append(1 - (p.communication_s / p.step_s if shown else 0.0))
    features, target = np.asarray(rows), np.asarray(targets)
    if with_fixed:
        fixed, per_sample = _least_squares(features, target)
        if fixed >= 0 and per_sample >= 0:
            return StepModel(fixed, per_sample, share)
        if per_sample < 0:
            (fixed,) = _least_squares(features[:, :1], target)
            return StepModel(max(fixed, 0.0), 0.0, share)
    (per_sample,) = _least_squares(features[:, 1:], target)
    return StepModel(0.0, max(per_sample, 0.0), share)


def _least_squares(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    solution, *_ = np.linalg.lstsq(features, target, rcond=None)
    return [float(v) for v in solution]


def _miss(model: StepModel, points: Sequence[Point]) -> float:
    """Sum of the squared relative misses."""
    return sum((model.step_s(p.samples, p.communication_s) / p.step_s - 1) ** 2 for p in points)


def held_out(points: Sequence[Point]) -> list[HeldOut]:
    """Fit the first two sizes, then three, and so on; foretell every larger one each time.

    Raises UsageError for fewer than three sizes: nothing would be left to hold the fit against.
    """
    ordered = sorted(points, key=lambda p: p.ranks)
    if len(ordered) < LEAST:
        raise UsageError(
            f"{LEAST} sizes are needed, two for the fit and one to hold it against (measured: "
            f"{', '.join(str(p.ranks) for p in ordered) or 'none'})"
        )
    found = []
    for count in range(2, len(ordered)):
        model = fit_steps(ordered[:count])
        fitted = tuple(p.ranks for p in ordered[:count])
        for p in ordered[count:]:
            predicted = model.step_s(p.samples, p.communication_s)
            found.append(HeldOut(fitted, p.ranks, predicted, p.step_s))
    return found
