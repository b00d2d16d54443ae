"""[METRIC] lines that are in no table are counted and named."""

from typing import Any

from jobkit.analysis.collect.lines import observed_metrics
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.results import collect
from jobkit.analysis.collect.steps import Observed
from jobkit.analysis.collect.unused import unused_lines
from support.fake_study import make_plan, whole_run

RATE = {"step": 10, "tokens_per_s": 4000.0}


def unused(*records: dict[str, Any], observed: Observed | None = None) -> str:
    return unused_lines(RunRecords(list(records)), observed)


def test_lines_without_a_time_or_a_rate_are_named() -> None:
    said = unused({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "grad_norm": 1.0})
    assert said == "2 [METRIC] lines are in no table (loss, grad_norm)"
    assert unused({"note": "x"}) == "1 [METRIC] line is in no table (note)"
    assert unused({"step": 5}) == "1 [METRIC] line is in no table (step)"


def test_what_is_in_a_table_is_not_counted() -> None:
    lines = observed_metrics([RATE], 1, {})
    assert unused(RATE, observed=lines) == ""
    assert unused({"epoch": 1, "anything": 2}) == ""
    assert unused({"v": 1, "kind": "window"}, {"v": 1, "kind": "message"}) == ""
    assert unused() == ""


def test_steps_that_were_measured_in_a_better_way_are_counted() -> None:
    assert unused(RATE, observed=Observed(source="auto")).startswith("1 [METRIC] line is")


def test_values_and_unknown_kinds_are_counted_and_few_names_are_shown() -> None:
    values = [{"v": 1, "kind": "value", "name": f"n{i}"} for i in range(9)]
    assert unused(*values) == "9 [METRIC] lines are in no table (n0, n1, n2, n3, n4, ...)"
    assert "(later)" in unused({"v": 1, "kind": "later"})


def test_collect_says_so() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    run_id = next(iter(plan.runs))
    whole_run(plan, run_id)
    with plan.paths.run(run_id).log.open("a") as log:
        log.write("[METRIC] weight_norm=3.5\n")
    (line,) = (x for x in collect(plan.paths.folder, write=False).warnings() if "no table" in x)
    assert line == f"{run_id}: 1 [METRIC] line is in no table (weight_norm)"
