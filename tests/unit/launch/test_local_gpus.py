"""What a launch on this machine says of its GPUs, before the runs start."""

import pytest

from jobkit.errors import UsageError
from jobkit.launch.local import start
from jobkit.spec.plan import Plan, Study

OTHERS_WAIT = (
    "--max-running 2: each run has GPUs of its own, and 3 are enough for 1 run of 2 at a time: "
    "others wait"
)


def plan(device: str) -> Plan:
    return Study(name="s", strategies=("ddp",), gpus=(1, 2), settings={"device": device}).expand()


@pytest.mark.parametrize(
    ("device", "gpus", "text"),
    [
        ("auto", 1, ["1 GPU for up to 2 ranks: runs with more ranks than GPUs compute on the CPU"]),
        ("auto", 2, []),
        ("auto", 0, []),
        ("cpu", 1, []),
        ("cuda", 2, []),
    ],
)
def test_too_few_gpus_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, text: list[str]
) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda _: range(8))
    assert start.warnings(plan(device)) == text


def test_too_few_gpus_for_device_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: 1)
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UsageError, match="--device cuda: 2 ranks need as many GPUs"):
        start.check(plan("cuda"))


@pytest.mark.parametrize(
    ("device", "gpus", "at_once", "text"),
    [
        ("auto", 4, 2, []),
        ("cuda", 3, 2, [OTHERS_WAIT]),
        ("cuda", 3, 1, []),
        ("cpu", 1, 2, []),
        ("auto", 0, 2, []),
    ],
)
def test_runs_at_a_time_that_have_to_wait_for_gpus_are_told_of(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, at_once: int, text: list[str]
) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda _: range(8))
    assert start.warnings(plan(device), at_once) == text
