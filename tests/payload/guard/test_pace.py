"""On GPUs the ranks agree at intervals, and still act at one iteration. Ranks in lockstep."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from jobkit.payload.guard import consensus
from jobkit.payload.guard.consensus import Consensus, Pace

WORLD = 3


class Lockstep:
    """all_reduce of ranks that are called one after the other: done once the last has called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.waiting, self.rank = 0, [], 0
        monkeypatch.setattr(dist, "get_world_size", lambda _: WORLD)
        monkeypatch.setattr(dist, "get_rank", lambda _: self.rank)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def ranks(self, pace: Pace | None) -> list[Consensus]:
        made = []
        for self.rank in range(WORLD):
            made.append(Consensus(None, pace))  # type: ignore[arg-type]
        return made

    def all_reduce(self, tensor: torch.Tensor, *_: object, **__: object) -> SimpleNamespace:
        self.calls += 1
        self.waiting.append(tensor)
        if len(self.waiting) == WORLD:
            largest = torch.stack(self.waiting).amax(0)
            for each in self.waiting:
                each.copy_(largest)
            self.waiting = []
        return SimpleNamespace(wait=lambda: None)


class Ten(Pace):
    """Proposes ten after the fifth iteration."""

    def proposal(self, iteration: int) -> int:
        return 10 * (iteration == 5)


@pytest.mark.parametrize(("pace", "calls", "stop"), [(None, 100, 43), (Ten(None), 6 + 10, 60)])
def test_how_often_and_where(
    monkeypatch: pytest.MonkeyPatch, pace: Pace | None, calls: int, stop: int
) -> None:
    group = Lockstep(monkeypatch)
    ranks, acted = group.ranks(pace), []
    for iteration in range(1, 101):
        for rank, each in enumerate(ranks):
            asked = consensus._STOP if rank == 1 and iteration >= 42 else consensus._NOTHING
            if each.agree(asked) == consensus._STOP:
                acted.append((iteration, rank))
    assert [first for first in acted if first[0] == acted[0][0]] == [
        (stop, r) for r in range(WORLD)
    ]
    assert group.calls == WORLD * calls


def test_the_interval_comes_from_the_measured_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.0099])  # two iterations of 5 ms
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(consensus, "time", SimpleNamespace(monotonic=lambda: next(now)))
    pace = Pace(torch.device("cuda", 0))
    assert [pace.proposal(i) for i in range(1, 8)] == [0, 0, 0, 0, 10, 0, 0]


def test_on_a_cpu_the_ranks_agree_after_every_iteration() -> None:
    assert [Pace(torch.device("cpu")).proposal(i) for i in range(1, 8)] == [0] * 7
