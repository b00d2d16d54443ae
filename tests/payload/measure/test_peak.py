"""The memory of a replica is never the run's peak."""

from collections.abc import Callable

import pytest
import torch

from jobkit.payload import host
from jobkit.payload.host import PeakMemory
from jobkit.payload.measure.peak import OwnPeak

MIB, NAN = 2**20, float("nan")


class Memory:
    """A process's memory: what is held, and the peaks since the last reset."""

    def __init__(self) -> None:
        self.held = self.peak = self.reserved = 0

    def hold(self, mib: int) -> None:
        self.held += mib
        self.peak, self.reserved = max(self.peak, self.held), max(self.reserved, self.held)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()

    def reset(device: torch.device) -> None:
        made.peak = made.reserved = made.held

    def stats(device: torch.device) -> None:
        made.peak = made.held

    def empty(size: int, **_: object) -> None:
        made.hold(size // MIB)
        made.held -= size // MIB

    monkeypatch.setattr(
        host, "peak_memory_mib", lambda device: PeakMemory(made.peak, made.reserved, made.peak)
    )
    monkeypatch.setattr(host, "reset_peak_memory", reset)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", stats)
    monkeypatch.setattr(torch, "empty", empty)
    return made


def step(memory: Memory, mib: int = 100) -> None:
    memory.hold(mib)
    memory.held -= mib


def test_a_peak_is_that_of_the_training_alone(memory: Memory) -> None:
    peak = OwnPeak(torch.device("cuda", 0))
    memory.hold(50)
    step(memory)
    assert peak.now() == PeakMemory(150, 150, 150)
    peak.pause()
    memory.hold(900)
    step(memory)
    assert peak.now() == PeakMemory(150, 150, 150)  # an epoch may end with the replica there
    memory.held -= 900
    peak.resume()
    assert memory.reserved == 150  # reserved again, so that no iteration has to
    assert peak.now() == PeakMemory(150, 150, 150)
    step(memory, 130)
    assert peak.now() == PeakMemory(180, 180, 180)


def test_on_the_cpu_only_resident_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(host, "peak_memory_mib", lambda _: PeakMemory(NAN, NAN, memory.peak))
    never: Callable[..., None] = lambda *_: pytest.fail("no GPU")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_reserved", never)
    peak = OwnPeak(torch.device("cpu"))
    step(memory, 70)
    peak.pause()
    memory.hold(900)
    memory.held -= 900
    peak.resume()
    found = peak.now()
    assert found.resident == 70
    assert found.allocated != found.allocated  # NaN
