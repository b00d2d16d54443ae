"""Times of single steps: the figure, the sentence, and where there is none."""

from dataclasses import replace

import pytest

from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.collect.steps import Observation, Observed, rate_row, step_rows
from jobkit.analysis.figures.step_times import step_figure
from jobkit.analysis.findings.stragglers import uneven_steps
from support.fake_study import FakeRun, make_plan

P99 = {1: 0.11, 2: 0.3}


def window(run: FakeRun, step: int, p99_s: float) -> None:
    run.writer.write(
        "window", step=step, steps=20, wall_s=2.0, work=100, epoch=0, paused_s=0.0,
        step_p50_s=0.1, step_p95_s=0.105, step_p99_s=p99_s, step_max_s=p99_s, warmup=step < 25,
    )  # fmt: skip


@pytest.fixture
def results() -> Results:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        window(run, 20, 9.0)  # warm-up
        window(run, 40, P99[spec.world_size])
        run.train(0, 1, 2).end()
    return collect(plan.paths.folder, write=False)


def test_the_payload_has_steps_and_its_rate_stays_that_of_its_epochs(results: Results) -> None:
    for row in results.runs.to_dict("records"):
        assert row["throughput_source"] == "epochs of the training"
        assert row["step_p99_s"] == P99[row["world_size"]]
        assert (row["step_p50_s"], row["steps_timed"], row["step_time_s"]) == (0.1, 20, 0.1)
    assert len(results.steps) == 4
    assert set(results.steps["throughput_unit"]) == {"images/s"}


def test_the_figure_has_a_line_for_each_percentile(results: Results) -> None:
    figure = step_figure(results)
    assert figure is not None
    lines = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert lines == [[0.1, 0.1], [0.105, 0.105], [0.11, 0.3]]
    empty = replace(results, runs=results.runs.assign(step_p50_s=float("nan")))
    assert step_figure(empty) is None
    assert uneven_steps(empty, "GPUs") == []


def test_the_sentence_names_the_most_uneven_size(results: Results) -> None:
    (said,) = uneven_steps(results, "GPUs")
    assert said.startswith("Single steps, most uneven in ddp on 2 GPUs: ")
    assert said.endswith("is 3.00 times the median.")
    one = replace(results, runs=results.runs[results.runs["world_size"] == 1])
    (said,) = uneven_steps(one, "GPUs")
    assert said.startswith("Single steps, of ddp on 1 GPU: ")
    assert said.endswith("is 1.10 times the median.")
    few = replace(results, runs=results.runs.assign(steps_timed=19))
    assert uneven_steps(few, "GPUs") == []


def test_steps_of_the_warm_up_alone_have_no_percentiles() -> None:
    one = Observation(steps=5, time_s=1.0, warmup=True, percentiles={"step_p50_s": 0.2})
    row = rate_row(Observed(steps=[one]))
    assert "step_time_s" in row and "step_p50_s" not in row


def test_joined_rows_have_the_percentiles_over_their_windows() -> None:
    """Of more windows than steps.csv has rows; the longest step is the maximum all the same."""
    values = [1.0, 1.0, 9.0] * 1000
    names = ("step_p50_s", "step_max_s")
    windows = [Observation(steps=1, time_s=v, percentiles=dict.fromkeys(names, v)) for v in values]
    rows = step_rows(Observed(steps=windows))
    assert len(rows) == 1000
    assert {(r["step_p50_s"], r["step_max_s"]) for r in rows} == {(1.0, 9.0)}


def test_a_window_counts_as_often_as_it_has_steps() -> None:
    def made(*pairs: tuple[int, float]) -> float:
        steps = [Observation(steps=n, time_s=n, percentiles={"step_p50_s": v}) for n, v in pairs]
        return float(rate_row(Observed(steps=steps))["step_p50_s"])

    assert made((50, 1.0), (2, 9.0), (3, 9.0)) == 1.0
    assert made((5, 1.0), (5, 2.0)) == 1.5
    assert made((1, 3.0)) == 3.0
