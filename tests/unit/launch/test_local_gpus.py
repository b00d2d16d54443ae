"""GPUs of this machine: what a launch says of them, and which of them each run gets."""

import pytest

from jobkit.errors import UsageError
from jobkit.launch import local
from jobkit.launch.local import Slots, wanted_gpus
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study

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
        ("auto", 0, 2, []),
        ("cpu", 1, 2, []),
        ("auto", 4, 2, []),
        ("cuda", 3, 2, [OTHERS_WAIT]),
        ("cuda", 3, 1, []),
    ],
)
def test_what_too_few_gpus_mean_is_told(monkeypatch, device, gpus, at_once, text) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: gpus)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    assert local.warnings(plan(device), at_once) == text


def test_too_few_gpus_for_device_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: 1)
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UsageError, match="--device cuda: 2 ranks need as many GPUs"):
        local.check(plan("cuda"))


def run(ranks: int, device: str = "auto", strategy: str = "ddp") -> int:
    return wanted_gpus(RunSpec(strategy=strategy, ranks_per_node=ranks, device=device))


@pytest.mark.parametrize(
    ("at_once", "device", "free", "lent"),
    [
        (2, "auto", ["4", "5"], {"CUDA_VISIBLE_DEVICES": "4,5"}),
        (1, "auto", ["4", "5"], {}),  # one run at a time sees what its user sees
        (2, "cpu", ["4", "5"], {}),
        (2, "auto", [], {}),
    ],
)
def test_gpus_are_lent_where_runs_share_them(monkeypatch, at_once, device, free, lent) -> None:
    name = "CUDA_VISIBLE_DEVICES" if free else ""
    monkeypatch.setattr(local, "lendable_gpus", lambda _: (name, free))
    assert Slots.for_runs([run(1, device)], at_once, {}).take(run(2)) == lent


def test_no_gpu_is_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ("CUDA_VISIBLE_DEVICES", ["4", "5", "6", "7"])
    monkeypatch.setattr(local, "lendable_gpus", lambda _: free)
    gpus = Slots.for_runs([run(1)], 2, {})
    first, second = gpus.take(run(2)), gpus.take(run(1))
    assert first == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert second == {"CUDA_VISIBLE_DEVICES": "6"}
    assert gpus.take(run(2)) is None  # one is free
    assert gpus.take(run(4, "cpu")) == {}  # which waits for none
    gpus.free(first)
    third = gpus.take(run(3))
    assert third == {"CUDA_VISIBLE_DEVICES": "4,5,7"}
    gpus.free(second)
    gpus.free(third)
    for spec in (run(1, strategy="dp"), run(8)):  # dp, and more ranks than GPUs, get all
        lent = gpus.take(spec)
        assert lent == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"} and gpus.take(run(1)) is None
        gpus.free(lent)
