"""From the parts of some iterations on every rank to the fields of the breakdown record.

Load imbalance is told apart: the lasting part, of a rank that is slower than the others beyond
chance, and the random part, of ranks that are slow in turn. In iteration j rank i is busy with
u(i, j) seconds of its own; its excess e(i, j) = u(i, j) - mean over ranks of u(., j) has over n
iterations the mean m and the standard error s = stdev / sqrt(n). The lasting imbalance is that of
the largest m among the ranks with m > 3 s.

Waiting for ranks that are slow in turn is in each rank's communication in most iterations and not
in all: its part is a mean. Slow passes of the replica must not enter that mean. Where the waiting
was measured directly as well, it is the mean of that measure plus the median of what the replica
says beyond it; else iterations with an implausibly slow replica do not count, by

    d(i, j) = passes - the same without communication
    c(j)    = minimum over the ranks of d(., j)      the rank that waits for no other
    not counted: d(i, j) < median of c - max(3 s, 5 % of the passes), s from the MAD of c
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEWEST = 3  # iterations from which means are worth a record
_BEYOND_CHANCE = 3.0  # standard errors
_DISAGREE, _NO_MATTER = 0.2, 0.05  # shares: of the larger measure; of the iteration
_MAD_TO_STDEV = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Parts:
    """Seconds of one iteration on one rank."""

    wall: float
    data_wait: float
    passes: float  # forward and backward, waiting included
    alone: float  # the same without communication
    step: float  # of the optimizer
    waited: float | None = None  # of the passes, measured without a replica; None: not measured

    @property
    def beyond(self) -> float:
        """By how much the passes take longer than without communication."""
        return self.passes - self.alone

    @property
    def useful(self) -> float:
        """What this rank does itself, by the measure that knows the iteration best."""
        exposed = max(self.beyond, 0.0) if self.waited is None else self.waited
        own = self.wall - self.data_wait - exposed
        return max(own, 0.0)


def record(everyone: Sequence[Sequence[Parts]]) -> dict[str, Any]:
    """The fields of the breakdown record from all ranks' iterations; see metric.line.KINDS."""
    usual = _usual([max(one.wall for one in ranks) for ranks in zip(*everyone, strict=True)])
    kept = [[found[i] for i in usual] for found in everyone]
    least = _least_plausible(everyone)
    ranks = [means(some, found, least) for some, found in zip(kept, everyone, strict=True)]
    fields: dict[str, Any] = {
        f"{part}_s": statistics.fmean(rank[part] for rank in ranks)
        for part in ("compute", "communication", "data_wait", "other")
    }
    iteration = max(rank["wall"] for rank in ranks)
    fields["iteration_s"] = iteration
    fields |= _imbalance(kept, ranks, iteration)
    fields["last_rank_wait_s"] = max(iteration - sum(list(fields.values())[:4]), 0.0)
    fields |= _check(ranks, iteration)
    return {**fields, "iterations": len(usual)}


def _usual(walls: list[float]) -> list[int]:
    """The indices of the middle half of the iterations by time: robust against outliers."""
    order, cut = sorted(range(len(walls)), key=walls.__getitem__), len(walls) // 4
    return order[cut : len(order) - cut]


def _least_plausible(everyone: Sequence[Sequence[Parts]]) -> float:
    """Seconds of exposed communication below which a pass of the replica was disturbed."""
    of_last = [min(parts.beyond for parts in ranks) for ranks in zip(*everyone, strict=True)]
    middle = statistics.median(of_last)
    spread = _MAD_TO_STDEV * statistics.median(abs(one - middle) for one in of_last)
    passes = statistics.median(parts.passes for found in everyone for parts in found)
    return middle - max(_BEYOND_CHANCE * spread, _NO_MATTER * passes)


def means(
    found: Sequence[Parts], every: Sequence[Parts] | None = None, least: float = -math.inf
) -> dict[str, float]:
    """Seconds per iteration by part, of one rank.

    every: all of its iterations, more than those of the means, which may be just those with a slow
    replica. least: see _least_plausible.
    """
    every = every or found

    def mean(name: str) -> float:
        return statistics.fmean(getattr(parts, name) for parts in found)

    wall, wait, passes = mean("wall"), mean("data_wait"), mean("passes")
    step = mean("step")
    checked = all(parts.waited is not None for parts in every)
    direct = statistics.fmean(parts.waited or 0.0 for parts in found) if checked else math.nan
    if checked:
        exposed = direct + statistics.median(p.beyond - (p.waited or 0.0) for p in every)
    else:
        sound = [p for p in found if p.beyond >= least] or [p for p in every if p.beyond >= least]
        exposed = statistics.fmean(p.beyond for p in sound or found)
    exposed = min(max(exposed, 0.0), passes)
    return {
        "compute": passes - exposed + step,
        "communication": exposed,
        "data_wait": wait,
        "other": max(wall - wait - passes - step, 0.0),
        "wall": wall,
        "direct": direct,
    }


def _imbalance(
    kept: Sequence[Sequence[Parts]], ranks: Sequence[dict[str, float]], iteration: float
) -> dict[str, float]:
    """Maxima over the ranks, of what lasts; and what ranks that are slow in turn cost."""
    useful = [rank["compute"] + rank["other"] for rank in ranks]
    busy = [u + rank["data_wait"] for u, rank in zip(useful, ranks, strict=True)]
    own = [[parts.useful for parts in found] for found in kept]
    slow = _slow_rank(own)
    longest = statistics.fmean(useful)
    if slow is not None:
        longest = max(useful[slow], longest)
    busiest = min(longest + max(busy) - max(useful), iteration)
    averages = [statistics.fmean(one) for one in own]
    of_each = statistics.fmean(max(column) for column in zip(*own, strict=True))
    turns = of_each - (statistics.fmean(averages) if slow is None else averages[slow])
    return {
        "useful_max_s": longest,
        "busy_max_s": busiest,
        "random_imbalance_s": min(max(turns, 0.0), iteration - busiest),
    }


def _slow_rank(own: Sequence[Sequence[float]]) -> int | None:
    """The slowest of the ranks that are slower than the mean beyond chance; None: none is.

    The slowest one in a few iterations may just have had more of its turns.
    """
    middle = [statistics.fmean(column) for column in zip(*own, strict=True)]
    lasting: dict[int, float] = {}
    for rank, one in enumerate(own):
        excess = [u - m for u, m in zip(one, middle, strict=True)]
        mean, count = statistics.fmean(excess), len(excess)
        error = statistics.stdev(excess) / math.sqrt(count) if count >= FEWEST else 0.0
        if mean > _BEYOND_CHANCE * error:
            lasting[rank] = mean
    return max(lasting, key=lambda rank: lasting[rank], default=None)


def _check(ranks: Sequence[dict[str, float]], iteration: float) -> dict[str, Any]:
    """Exposed communication by the second measure, and whether the first is certain."""
    direct = statistics.fmean(rank["direct"] for rank in ranks)
    if math.isnan(direct):
        return {"communication_direct_s": None, "certain": None}
    by_replica = statistics.fmean(rank["communication"] for rank in ranks)
    most = max(_DISAGREE * max(direct, by_replica), _NO_MATTER * iteration)
    return {"communication_direct_s": direct, "certain": abs(direct - by_replica) <= most}
