"""The efficiencies of the POP centre of excellence, which explain losses against ideal scaling.

The model is the multiplicative one of POP (https://pop-coe.eu/node/69; Rosas, Gimenez and Labarta,
"Scalability prediction for fundamental performance factors", 2014), with the wait for data as a
factor of its own. Of one iteration, in seconds, rank i is

    u(i) = compute + host             useful: all that is not waiting, as in POP
    b(i) = u(i) + data wait           busy: all but exposed communication
    r                                 random imbalance: how much longer the slowest rank of each
                                      iteration takes, on average, than max u
    T                                 wall time of the slowest rank

and with the mean and the maximum over the ranks, the maximum of u of what lasts over iterations,

    load balance              LB = mean u / max u
    random balance            RB = max u / (max u + r)
    data wait factor          DW = (max u + r) / (max b + r)
    communication efficiency  CE = (max b + r) / T
    useful share              US = LB x RB x DW x CE = mean u / T
    computation scalability   CS = useful seconds of all ranks for one sample at the smallest
                                   measured size / the same at this size
    global efficiency         GE = US x CS

u <= b <= T on every rank and r <= T - max b, so all of them lie between 0 and 1. A slow rank makes
the others wait inside their communication; as CE knows the busiest rank only, that wait counts as
load imbalance. RB, which POP does not have, tells a rank that is slow from ranks slow in turn. POP
calls US parallel efficiency, a name that here is kept for X(N) B / (X(B) N), which is GE over that
of the smallest size. POP's serialisation, transfer, instructions and frequency are not measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one iteration: the first four are means over the ranks. See metric.KINDS."""

    compute_s: float
    communication_s: float
    data_wait_s: float
    host_s: float
    iteration_s: float
    useful_max_s: float
    busy_max_s: float
    # Not in records of earlier versions:
    random_imbalance_s: float = 0.0
    last_rank_wait_s: float = 0.0

    @property
    def useful_s(self) -> float:
        """Compute and host: mean over the ranks."""
        return self.compute_s + self.host_s

    @property
    def slower_ranks_s(self) -> float:
        """Of communication_s: waiting for slower ranks, mean over the ranks.

        The busiest rank waits for none: what it communicates, T - max b - r, all ranks do.
        """
        most = self.busy_max_s + self.random_imbalance_s
        waiting = most - self.useful_s - self.data_wait_s - self.last_rank_wait_s
        return min(max(waiting, 0.0), self.communication_s)

    @property
    def messages_s(self) -> float:
        """The rest of communication_s."""
        return self.communication_s - self.slower_ranks_s


_CLOCKS = 0.02  # by which the host's clock and a GPU's events may differ
_LATER = ("random_imbalance_s", "last_rank_wait_s")


@dataclass(frozen=True)
class Step:
    """One iteration of a size: how long it takes, on how many ranks, with how many samples."""

    times: Breakdown
    ranks: int
    samples: float  # in all, of the global batch

    @property
    def useful_s_per_sample(self) -> float:
        return self.times.useful_s * self.ranks / self.samples


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The factors of one size: 1 is ideal, and their product is the global efficiency."""

    load_balance: float
    random_balance: float
    data_wait: float
    communication: float
    computation: float  # scalability; above 1 where the ranks work faster than at the base

    @property
    def useful(self) -> float:
        """The share of an iteration in which the ranks do useful work."""
        return self.load_balance * self.random_balance * self.data_wait * self.communication

    @property
    def overall(self) -> float:
        """The global efficiency."""
        return self.useful * self.computation


def breakdown(values: Mapping[str, Any], prefix: str = "") -> Breakdown | None:
    """The breakdown in a record or a row; None where a field is missing or contradicts another.

    prefix: before the fields' names, as in results.csv.
    """
    found = {f.name: values.get(f"{prefix}{f.name}") for f in fields(Breakdown)}
    found |= {name: 0.0 for name in _LATER if not _is_time(found[name])}
    if not all(_is_time(value) for value in found.values()):
        return None
    times = Breakdown(**{name: float(value) for name, value in found.items()})  # type: ignore[arg-type]
    ordered = (0.0, times.useful_s, times.useful_max_s, times.busy_max_s, times.iteration_s)
    # Then no maximum is 0, and no factor above 1 but for that.
    grows = all(a <= b * (1 + _CLOCKS) for a, b in pairwise(ordered))
    return times if times.useful_s > 0 and grows else None


def efficiencies(own: Step, base: Step) -> Efficiencies:
    """The factors of a size; base: the smallest measured size of its series."""
    times, random = own.times, own.times.random_imbalance_s
    return Efficiencies(
        load_balance=min(times.useful_s / times.useful_max_s, 1.0),  # of two clocks
        random_balance=times.useful_max_s / (times.useful_max_s + random),
        data_wait=(times.useful_max_s + random) / (times.busy_max_s + random),
        communication=(times.busy_max_s + random) / times.iteration_s,
        computation=base.useful_s_per_sample / own.useful_s_per_sample,
    )


def _is_time(value: Any) -> bool:
    """Whether a value is a number of seconds; pandas has NA, which is no float, for none."""
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
