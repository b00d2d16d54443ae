"""collect_results.py --min-efficiency: a script can rely on its exit code."""

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.spec.plan import Plan
from support.codes import code_of
from support.fake_study import FakeRun, make_plan, whole_run, whole_study


def gate(least: float, at: int) -> int:
    return collect_main(["s", "--min-efficiency", str(least), "--at", str(at)])


def partly(fails: int) -> Plan:
    """A study of 1, 2 and 4 ranks in which the runs of one size failed."""
    plan = make_plan(strategies=("ddp",), gpus=(1, 2, 4))
    for run_id, spec in plan.runs.items():
        if spec.world_size == fails:
            FakeRun(plan.paths.folder, run_id, spec).begin().end("failed", "x", 1)
        else:
            whole_run(plan, run_id)
    return plan


def test_met_is_0_and_not_met_is_4_and_names_the_series(capsys) -> None:
    whole_study(strategies=("ddp", "fsdp"), gpus=(1, 4), repeats=2)  # efficiency: 3.7 / 4
    assert gate(0.92, 4) == 0
    assert "threshold" not in capsys.readouterr().err
    assert gate(0.93, 4) == 4
    ddp, fsdp = capsys.readouterr().err.splitlines()
    assert ddp.startswith("threshold not met: ddp at 4 ranks: efficiency 92.5% [")
    assert ddp.endswith("is below 93.0% (relative to 1 rank)")
    assert "fsdp at 4 ranks" in fsdp


def test_a_size_that_failed_does_not_pass(capsys) -> None:
    partly(fails=4)
    assert gate(0.1, 4) == 4
    assert "ddp at 4 ranks: no efficiency: no run that is ok" in capsys.readouterr().err
    assert gate(0.1, 2) == 3  # met, but a run is not ok


def test_a_size_does_not_pass_against_itself(capsys) -> None:
    """Where the smallest size failed, the next one is the baseline: of efficiency 1."""
    partly(fails=1)
    assert gate(0.1, 2) == 4
    assert "no smaller size was measured" in capsys.readouterr().err
    assert gate(0.1, 4) == 3


def test_a_series_that_is_not_planned_there_is_named(capsys) -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2))
    whole_study(strategies=("fsdp",), gpus=(1, 4))
    assert gate(0.5, 4) == 4
    assert "ddp: not planned at 4 ranks" in capsys.readouterr().err


def test_a_strategy_of_one_rank_needs_no_larger_size(capsys) -> None:
    whole_study(
        strategies=("single", "ddp"), gpus=(1, 4), sweep={"lr": [0.1, 0.05]}, settings={"epochs": 1}
    )
    assert gate(0.5, 4) == 0
    assert "not planned" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "4"], "go together"),
        (["--min-efficiency", "0.9"], "go together"),
        (["--min-efficiency", "85", "--at", "2"], "at most 1, as 0.85"),
        (["--min-efficiency", "x", "--at", "2"], "'x': must be a number above 0"),
        (["--min-efficiency", "nan", "--at", "2"], "at most 1"),
        (["--min-efficiency", "0.9", "--at", "0"], "1 or more"),
        (["--min-efficiency", "0.9", "--at", "3"], r"no such size (it has: 1, 2)"),
    ],
)
def test_wrong_usage_is_2(words: list[str], said: str, capsys) -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2))
    assert code_of(collect_main, ["s", *words]) == 2
    assert said in capsys.readouterr().err
