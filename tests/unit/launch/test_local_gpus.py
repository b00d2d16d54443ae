"""GPUs of this machine: what a launch says of them, and which of them each run gets."""

import pytest

from jobkit.errors import UsageError
from jobkit.launch.local import slots, start
from jobkit.launch.local.slots import Slots
from jobkit.spec.plan import Plan, Study
from jobkit.spec.runspec import RunSpec

ON_CPU = "1 GPU for up to 2 ranks: runs with more ranks than GPUs compute on the CPU"
OTHERS_WAIT = (
    "--max-running 2: each run has GPUs of its own, and 3 are enough for 1 run of 2 at a time: "
    "others wait"
)


def plan(device: str) -> Plan:
    return Study(name="s", strategies=("ddp",), gpus=(1, 2), settings={"device": device}).expand()


@pytest.mark.parametrize(
    ("device", "gpus", "at_once", "text"),
    [
        ("auto", 1, 1, [ON_CPU]),
        ("auto", 2, 1, []),
        ("auto", 0, 1, []),
        ("cpu", 1, 1, []),
        ("cuda", 2, 1, []),
        ("auto", 4, 2, []),
        ("cuda", 3, 2, [OTHERS_WAIT]),
        ("cuda", 3, 1, []),
        ("cpu", 1, 2, []),
        ("auto", 0, 2, []),
    ],
)
def test_what_too_few_gpus_mean_is_told(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, at_once: int, text: list[str]
) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda _: range(8))
    assert start.warnings(plan(device), at_once) == text


def test_too_few_gpus_for_device_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: 1)
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UsageError, match="--device cuda: 2 ranks need as many GPUs"):
        start.check(plan("cuda"))


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
