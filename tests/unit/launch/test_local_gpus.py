"""GPUs of this machine: what a launch says of them, and which of them each run gets."""

from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch import local
from jobkit.spec.study import Plan, Study

ON_CPU = "1 GPU for up to 2 ranks: runs with more ranks than GPUs compute on the CPU"


def plan(device: str) -> Plan:
    return Study(name="s", strategies=("ddp",), gpus=(1, 2), settings={"device": device}).expand()


def test_what_too_few_gpus_mean_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: True)
    for device, gpus, text in [
        ("auto", 1, [ON_CPU]), ("auto", 2, []), ("auto", 0, []), ("cpu", 1, [])
    ]:  # fmt: skip
        monkeypatch.setattr(local, "count_gpus", lambda gpus=gpus: gpus)
        assert local.warnings(plan(device)) == text
    with pytest.raises(UsageError, match="--device cuda: 2 ranks need as many GPUs"):
        local.check(plan("cuda"))


def started(gpus: list[int | None], at_once: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The GPUs that each run sees, in the order of the starts; a run ends once it was looked at."""
    seen: list[Any] = []

    class Children:
        def __init__(self, _: float) -> None:
            self.looks = 0

        def start(self, line: list[str], env: dict[str, str], **_: Any) -> None:
            seen.append((line[0], env.get("CUDA_VISIBLE_DEVICES")))

        def poll(self) -> bool:
            self.looks += 1
            return self.looks > 1

        def codes(self) -> list[int]:
            return [0]

    class Signals:
        def wait(self, _: float) -> list[int]:
            seen.append("|")
            return []

    four = ("CUDA_VISIBLE_DEVICES", ["4", "5", "6", "7"])
    monkeypatch.setattr(local, "lendable_gpus", lambda _: four)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "Children", Children)
    monkeypatch.setattr(local, "adopt_orphans", lambda: None)
    monkeypatch.setattr(local, "end_descendants", lambda **_: None)
    runs = {f"r{n}": {"line": [f"r{n}"], "gpus": wanted} for n, wanted in enumerate(gpus)}
    order = {"runs": runs, "at_once": at_once, "parent": None}
    study = plan("auto").paths
    local.drive(study, order, Signals())  # type: ignore[arg-type]
    return seen


def test_no_gpu_is_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """dp, and more ranks than GPUs, get all that there are; the CPU waits for none."""
    seen = started([2, 1, 2, 0, None, 8], 3, monkeypatch)
    assert seen == [
        *[("r0", "4,5"), ("r1", "6"), "|", "|"],
        *[("r2", "4,5"), ("r3", None), "|", "|"],
        *[("r4", "4,5,6,7"), "|", "|", ("r5", "4,5,6,7"), "|", "|"],
    ]


def test_one_run_at_a_time_sees_what_its_user_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started([2, None], 1, monkeypatch) == [("r0", None), "|", "|", ("r1", None), "|", "|"]
