"""Runs that are at work at a time on this machine each see GPUs of their own."""

import pytest

from jobkit.launch.local import slots
from jobkit.launch.local.slots import Slots
from jobkit.spec.runspec import RunSpec

FOUR = ("CUDA_VISIBLE_DEVICES", ["4", "5", "6", "7"])


def run(ranks: int, device: str = "auto", strategy: str = "ddp") -> RunSpec:
    return RunSpec(strategy=strategy, ranks_per_node=ranks, device=device)


def made(monkeypatch: pytest.MonkeyPatch, at_once: int = 2, device: str = "auto") -> Slots:
    monkeypatch.setattr(slots, "lendable_gpus", lambda _: FOUR)
    return Slots.for_runs([run(1, device)], at_once, {})


def test_no_gpu_is_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = made(monkeypatch)
    first, second = all_of_them.lend(run(2)), all_of_them.lend(run(1))
    assert first == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert second == {"CUDA_VISIBLE_DEVICES": "6"}
    assert all_of_them.lend(run(2)) is None  # one is free
    all_of_them.take_back(first)
    assert all_of_them.lend(run(3)) == {"CUDA_VISIBLE_DEVICES": "4,5,7"}
    all_of_them.take_back(second)
    assert all_of_them.lend(run(1)) == {"CUDA_VISIBLE_DEVICES": "6"}


def test_dp_and_a_run_of_more_ranks_than_gpus_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = made(monkeypatch)
    for spec in (run(1, strategy="dp"), run(8)):
        lent = all_of_them.lend(spec)
        assert lent == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
        assert all_of_them.lend(run(1)) is None
        all_of_them.take_back(lent)


def test_a_run_on_the_cpu_waits_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = made(monkeypatch)
    all_of_them.lend(run(4))
    assert all_of_them.lend(run(4, "cpu")) == {}


@pytest.mark.parametrize(("at_once", "device"), [(1, "auto"), (2, "cpu")])
def test_nothing_is_set_where_runs_share_no_gpu(
    monkeypatch: pytest.MonkeyPatch, at_once: int, device: str
) -> None:
    """One run at a time sees what its user sees."""
    assert made(monkeypatch, at_once, device).lend(run(2)) == {}
    monkeypatch.setattr(slots, "lendable_gpus", lambda _: ("", []))
    assert Slots.for_runs([run(2)], 2, {}).lend(run(2)) == {}
