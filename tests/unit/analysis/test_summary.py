"""The summary: medians of like with like, and every run that is not ok with its reason."""

import io
import json
from statistics import median

import pytest
from rich.console import Console

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.summary import as_json, print_summary
from jobkit.analysis.scaling.sizes import Size
from support.fake_study import TRAIN_SAMPLES, FakeRun, make_plan, rate, whole_run, whole_study


def by_key(name: str = "s") -> dict[tuple[str, int | None], Size]:
    return {(s.series, s.world_size): s for s in collect(name).sizes}


def text(name: str = "s", width: int = 160) -> str:
    page = io.StringIO()
    print_summary(collect(name), Console(file=page, width=width, highlight=False))
    return page.getvalue()


def test_medians_speed_up_and_efficiency() -> None:
    plan = whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2, 4), repeats=3)
    found = by_key()
    assert list(found) == [(s, n) for s in ("ddp", "fsdp") for n in (1, 2, 4)]
    rates = {n: median(rate(s) for s in plan.runs.values() if key(s) == ("ddp", n)) for n in (1, 4)}
    four = found["ddp", 4]
    assert four.throughput == rates[4]
    assert four.time_s == pytest.approx(TRAIN_SAMPLES / rates[4])
    assert four.speed_up == pytest.approx(rates[4] / rates[1])
    assert four.efficiency == pytest.approx(rates[4] / rates[1] / 4)
    assert (four.runs_ok, four.runs_planned, four.base_world_size) == (3, 3, 1)
    assert found["ddp", 1].efficiency == 1.0


def key(spec) -> tuple[str, int]:
    return spec.strategy, spec.world_size


def test_a_run_that_is_not_ok_enters_no_median() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=2)
    good, bad = sorted(plan.runs, key=lambda r: plan.runs[r].repeat)
    whole_run(plan, good)
    FakeRun(plan.paths.folder, bad, plan.runs[bad]).begin().train(0, 1).end("failed", "x", 1)
    size = by_key()["ddp", 1]
    assert size.throughput == rate(plan.runs[good])
    assert (size.runs_ok, size.runs_planned, size.not_ok) == (1, 2, ("failed",))


def test_the_base_is_the_smallest_size_that_was_measured_and_is_told() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2, 4))
    for run_id, spec in plan.runs.items():
        if spec.world_size > 1:
            whole_run(plan, run_id)
    found = by_key()
    assert found["ddp", 1].speed_up is None
    assert (found["ddp", 2].speed_up, found["ddp", 4].base_world_size) == (1.0, 2)
    speed_up = found["ddp", 4].speed_up
    assert found["ddp", 2].efficiency == 1.0
    assert speed_up is not None
    assert found["ddp", 4].efficiency == pytest.approx(speed_up / 2)
    assert "ddp: speed-up and efficiency relative to 2 ranks" in text()


def test_different_settings_are_never_mixed() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2), sweep={"precision": ("fp32", "bf16")})
    whole_study(strategies=("ddp",), gpus=(1, 2), settings={"batch_size_per_rank": 256})
    found = collect("s").sizes
    assert [s.runs_planned for s in found] == [1] * 6
    assert {s.series for s in found if s.scaling == "weak"} == {
        "ddp, fp32, weak, batch_size_per_rank=256"
    }


def test_the_same_ranks_on_other_nodes_are_another_size() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, "2x1"))
    found = collect("s").sizes
    assert [(s.nodes, s.ranks_per_node) for s in found] == [(1, 1), (1, 2), (2, 1)]
    assert "2 (2x1)" in text()


def test_the_page_says_all_that_matters() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    good, bad = plan.runs
    whole_run(plan, good)
    run = FakeRun(plan.paths.folder, bad, plan.runs[bad]).begin()
    run.end("failed", "rank 1: ValueError: [red]boom[/red]", 1)
    page = text()
    assert "s: 1 of 2 runs ok" in page
    assert f"failed    {bad}: rank 1: ValueError: [red]boom[/red]" in page
    assert "strong scaling" in page


def test_nothing_is_cut_on_a_narrow_terminal() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2), sweep={"precision": ("fp32", "bf16")})
    page = text(width=80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in page
    assert page.count("73.3%") == 4  # every cell of the last column


def test_json_is_complete_and_has_null_for_what_is_not_known() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    good = next(r for r, s in plan.runs.items() if s.world_size == 2)
    whole_run(plan, good)
    content = json.loads(as_json(collect("s")), parse_constant=pytest.fail)
    assert (content["study"], content["runs"], content["runs_ok"]) == ("s", 2, 1)
    assert not content["ok"]
    assert [s["speed_up"] for s in content["sizes"]] == [None, 1.0]
    (bad,) = content["not_ok"]
    assert (bad["status"], bad["evidence"]) == ("missing", None)
