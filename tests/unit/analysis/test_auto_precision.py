"""Settings that a run decides by its device: tables and series have what was decided."""

from dataclasses import replace

import pandas as pd

from jobkit.analysis.collect.results import collect
from jobkit.spec.plan import Plan
from support.fake_study import FakeRun, make_plan

GPU = {"precision": "bf16", "fp32": "tf32", "cudnn_benchmark": True}
CPU = {"precision": "fp32", "fp32": "ieee", "cudnn_benchmark": False}


def ran(plan: Plan, run_id: str, decided: dict[str, object]) -> None:
    spec = replace(plan.runs[run_id], **decided)  # type: ignore[arg-type]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1, 2).end()


def runs_of(plan: Plan) -> tuple[pd.DataFrame, list[str]]:
    found = collect("s", write=False)
    assert list(found.runs["run_id"]) == list(plan.runs)
    return found.runs, found.warnings()


def test_what_was_decided_is_in_the_tables_and_contradicts_no_plan() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2, 4))
    *done, _ = plan.runs
    for run_id in done:
        ran(plan, run_id, GPU)
    runs, warnings = runs_of(plan)
    assert list(runs["precision"]) == ["bf16", "bf16", "auto"]  # the last one has not begun
    assert list(runs["fp32"]) == ["tf32", "tf32", "auto"]
    assert set(runs["series"]) == {"ddp"}
    assert warnings == []


def test_a_gpu_and_a_cpu_are_two_series() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    for run_id, decided in zip(plan.runs, (GPU, CPU), strict=True):
        ran(plan, run_id, decided)
    runs, _ = runs_of(plan)
    assert [name.split(", ")[1] for name in runs["series"]] == ["bf16", "fp32"]


def test_a_run_that_was_told_joins_one_that_decided_the_same() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,), sweep={"precision": ("auto", "bf16")})
    for run_id in plan.runs:
        ran(plan, run_id, GPU)
    runs, _ = runs_of(plan)
    assert set(runs["series"]) == {"ddp"}


def test_a_log_from_before_auto_is_fp32() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    ran(plan, run_id, {})  # its record says nothing of a precision
    runs, warnings = runs_of(plan)
    assert list(runs["precision"]) == ["fp32"]
    assert warnings == []
