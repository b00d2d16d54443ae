"""The operations of the communication benchmark: how each is made, and how its result is checked.

Buffers are float32 and hold whole numbers below 2^24, so that a right sum is exact. A value
encodes its rank and its place, so that a part in the wrong place is detected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_ELEMENT_BYTES = 4
_PERIOD = 251  # of the pattern: a prime, so that it fits no power of two
COPIES = 4  # of a size that an operation may hold at once, its check included


@dataclass(frozen=True)
class Team:
    """The ranks that take part in an operation, and their barrier."""

    members: tuple[int, ...]  # ranks of the job
    rank: int  # this rank in the job
    device: torch.device
    group: Any = None  # of torch.distributed; None: all ranks

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """Return this rank's number in the team."""
        return self.members.index(self.rank)

    def synchronise(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        self.largest([0.0])

    def largest(self, values: list[float]) -> list[float]:
        """Return the maximum of each value over the members, the same on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


@dataclass(frozen=True)
class Exchange:
    """One operation at one size, ready to be timed."""

    bytes: int
    prepare: Callable[[], object]  # before each run: an earlier result must not look right
    run: Callable[[], object]
    is_right: Callable[[], bool]


def exchange(operation: str, team: Team, size: int) -> Exchange:
    """Make one operation; its bytes are size rounded down to equal parts for the members."""
    parts = max(1, size // _ELEMENT_BYTES // team.size)
    return _MAKERS[operation](team, parts * team.size)


def _pattern(team: Team, count: int) -> torch.Tensor:
    """Return 0, 1, ... 250, 0, 1, ...: the values of rank 0; those of rank r are r more."""
    period = torch.arange(_PERIOD, dtype=torch.float32, device=team.device)
    return period.repeat(-(-count // _PERIOD))[:count]


def _sum(team: Team, count: int) -> torch.Tensor:
    """Return the sum of the values of all members."""
    n = team.size
    return _pattern(team, count).mul_(n).add_(n * (n - 1) // 2)


def _all_reduce(team: Team, count: int) -> Exchange:
    source = _pattern(team, count).add_(team.index)
    buffer = torch.empty_like(source)
    return Exchange(
        count * _ELEMENT_BYTES,
        lambda: buffer.copy_(source),
        lambda: dist.all_reduce(buffer, group=team.group),
        lambda: torch.equal(buffer, _sum(team, count)),
    )


def _all_gather(team: Team, count: int) -> Exchange:
    part = count // team.size
    source = _pattern(team, part).add_(team.index)
    buffer = torch.empty(count, device=team.device)

    def is_right() -> bool:
        expected = _pattern(team, part)
        return all(torch.equal(got, expected + r) for r, got in enumerate(buffer.split(part)))

    return Exchange(
        count * _ELEMENT_BYTES,
        buffer.zero_,
        lambda: dist.all_gather_into_tensor(buffer, source, group=team.group),
        is_right,
    )


def _reduce_scatter(team: Team, count: int) -> Exchange:
    part = count // team.size
    source = _pattern(team, count).add_(team.index)
    # The backend may work in the input; a copy keeps every run the same.
    given, buffer = torch.empty_like(source), torch.empty(part, device=team.device)

    def prepare() -> None:
        given.copy_(source)
        buffer.zero_()

    def is_right() -> bool:
        own = slice(team.index * part, (team.index + 1) * part)
        return torch.equal(buffer, _sum(team, count)[own])

    return Exchange(
        count * _ELEMENT_BYTES,
        prepare,
        lambda: dist.reduce_scatter_tensor(buffer, given, group=team.group),
        is_right,
    )


def _broadcast(team: Team, count: int) -> Exchange:
    source = _pattern(team, count).add_(team.index)
    buffer = torch.empty_like(source)
    return Exchange(
        count * _ELEMENT_BYTES,
        lambda: buffer.copy_(source),
        lambda: dist.broadcast(buffer, team.members[0], group=team.group),
        lambda: torch.equal(buffer, _pattern(team, count)),
    )


def _all_to_all(team: Team, count: int) -> Exchange:
    part = count // team.size
    source = _pattern(team, count).add_(team.index)
    buffer = torch.empty_like(source)

    def is_right() -> bool:
        own = slice(team.index * part, (team.index + 1) * part)
        expected = _pattern(team, count)[own]
        return all(torch.equal(got, expected + r) for r, got in enumerate(buffer.split(part)))

    return Exchange(
        count * _ELEMENT_BYTES,
        buffer.zero_,
        lambda: dist.all_to_all_single(buffer, source, group=team.group),
        is_right,
    )


def _sendrecv(team: Team, count: int) -> Exchange:
    """Two ranks send to each other at once, as neighbours of a ring do."""
    assert team.size == 2, team
    source = _pattern(team, count).add_(team.index)
    buffer = torch.empty_like(source)
    other = team.members[1 - team.index]

    def run() -> None:
        both = [
            dist.P2POp(dist.isend, source, other, team.group),
            dist.P2POp(dist.irecv, buffer, other, team.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Exchange(
        count * _ELEMENT_BYTES,
        buffer.zero_,
        run,
        lambda: torch.equal(buffer, _pattern(team, count).add_(1 - team.index)),
    )


_MAKERS: dict[str, Callable[[Team, int], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "sendrecv": _sendrecv,
}
