"""The parts of the start-up: columns of results.csv, and a table where they are much of a run."""

import pytest

from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.findings.startup import startup_table
from support.fake_study import FakeRun, make_plan

PARTS = {"import_s": 2.0, "group_s": 0.5, "data_s": 0.25, "model_s": 0.125}
PARTS |= {"compile_s": None, "first_step_s": 0.75}


def study(seconds: dict[int, float], status: str = "ok") -> Results:
    """A study of which a run took 30 s, so much of it for the start, by number of ranks."""
    plan = make_plan(gpus=tuple(seconds), strategies=("ddp",))
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        run.writer.write("startup", **PARTS, total_s=seconds[spec.world_size])
        run.train(*range(spec.epochs)).end(status, "" if status == "ok" else "x")
    return collect("s")


def test_the_parts_are_columns() -> None:
    """Each field of the record, and empty where there is none."""
    runs = study({1: 3.0}).runs
    assert {name: runs[f"startup_{name}"][0] for name in PARTS if name != "compile_s"} == {
        name: value for name, value in PARTS.items() if value is not None
    }
    assert runs["startup_compile_s"].isna().all()


def test_only_sizes_with_a_long_start_are_in_the_table() -> None:
    """Exactly 10 % is not over 10 %."""
    (row,) = startup_table(study({1: 3.0, 2: 6.0})).rows
    assert row[1:] == ["2", "20%", "6", "2", "0.5", "0.25", "0.125", "-", "0.75"]


@pytest.mark.parametrize("status", ["failed", "preempted"])
def test_a_run_that_ended_early_is_in_no_table(status: str) -> None:
    """Its start is much of it by nature."""
    assert startup_table(study({2: 29.0}, status)).rows == []
