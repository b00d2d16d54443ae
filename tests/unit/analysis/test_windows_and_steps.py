"""Windows, steps and epochs that a run recorded: its rate, and its rows in steps.csv."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.lines import observed_metrics
from jobkit.analysis.collect.records import RunRecords, read_run
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.collect.rows import (
    WALL_TIME,
    epoch_time,
    observed_of,
    speed_row,
    steps_of_epoch,
    unused_lines,
    wall_time_s,
)
from jobkit.analysis.collect.steps import (
    TRAINING,
    Observation,
    Observed,
    observed_windows,
    rate_row,
    step_rows,
)
from jobkit.analysis.figures.by_size import size_figure
from jobkit.analysis.scaling.sizes import EPOCH, sizes
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.metric.kinds import encode
from jobkit.paths import RunPaths
from support.fake_study import FakeRun, make_plan


class Planned:
    """What a planned command says of its work."""

    def __init__(self, **known: Any) -> None:
        self.world_size = 2
        vars(self).update(known)


def left(folder: Path, rank: int, records: list[dict[str, Any]], attempt: int = 0) -> None:
    """Write the records of one rank as its meter would."""
    name = f"{attempt}.jsonl" if rank == 0 else f"{attempt}.r{rank}.jsonl"
    lines = []
    for seq, record in enumerate(records):
        common = {"v": 1, "kind": "window", "study": "s", "run_id": folder.name}
        lines.append(
            encode({**common, "attempt": attempt, "rank": rank, "seq": seq, "t": 1.0, **record})
        )
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "metrics" / name).write_text("".join(f"{line}\n" for line in lines))


def window(step: int, wall_s: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "steps": 10, "wall_s": wall_s, "work": 100, **more}


START = {"kind": "run_start", "world_size": 2, "unit": "samples", "source": "meter"}


def test_the_slowest_rank_counts_and_the_work_of_all_is_added_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = window(20, 2.0, data_wait_s=0.5, step_p50_s=0.2)
    left(folder, 0, [START, window(10, 9.0, warmup=True), window(20, 1.0, step_p50_s=0.1)])
    left(folder, 1, [window(10, 9.0, warmup=True), slow])
    records = read_run(RunPaths(folder), "run")
    observed = observed_of(RunPaths(folder), records, Planned())
    assert observed
    row = rate_row(observed)
    assert row["throughput"] == pytest.approx(200 / 2.0)
    assert row["throughput_unit"] == "samples/s"
    assert row["step_time_s"] == pytest.approx(0.2)
    assert row["data_wait_share"] == pytest.approx(0.25)
    assert (row["step_p50_s"], row["steps_timed"]) == (0.2, 10)
    assert [r["warmup"] for r in step_rows(observed)] == [True, False]
    assert records.lost == 0 and records.rejects == []


def test_ranks_that_end_their_windows_at_different_steps_share_what_lies_between(
    tmp_path: Path,
) -> None:
    """Each spaces its windows by its own clock; a rate of parts of them would be too low."""
    folder = tmp_path / "run"
    left(folder, 0, [START, window(10, 1.0), window(40, 3.0, steps=30, work=300)])
    own = [window(20, 1.5, step_p50_s=0.1), window(30, 1.0, step_p50_s=0.3), window(40, 1.0)]
    left(folder, 1, [window(10, 1.0), *own])
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), Planned())
    assert observed
    found = [(o.step, o.steps, o.time_s, o.work) for o in observed.steps]
    assert found == [(10, 10, 1.0, 200), (40, 30, 3.5, 600)]
    assert observed.steps[1].percentiles == {"step_p50_s": pytest.approx(0.2)}


@pytest.mark.parametrize("loses", [0, 1])
def test_a_lost_window_of_one_rank_leaves_its_work_unknown(tmp_path: Path, loses: int) -> None:
    folder = tmp_path / "run"
    for rank in (0, 1):
        steps = (10, 30) if rank == loses else (10, 20, 30, 40)
        left(folder, rank, [*([] if rank else [START]), *(window(n, 1.0) for n in steps)])
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), Planned())
    assert observed
    assert [(o.step, o.work) for o in observed.steps] == [(10, 200), (30, None), (40, None)]
    assert [(o.steps, o.time_s) for o in observed.steps] == [(10, 1.0), (20, 2.0), (10, 1.0)]


@pytest.mark.parametrize(
    ("start", "planned", "ranks", "rate"),
    [
        # What the study states counts, not what the program counted in another unit.
        ({"world_size": 1, "unit": "samples"}, {"unit": "tokens", "work_per_step": 4096.0}, None,
         (4096.0 * 10, "tokens/s")),
        ({"world_size": 1, "unit": "samples"}, {"unit": "tokens"}, None, (100.0, "samples/s")),
        ({"world_size": 1}, {}, None, (100.0, "units/s")),
        ({}, {}, 8, (10.0, "steps/s")),  # cut off: the windows are of one of eight ranks
    ],
)  # fmt: skip
def test_the_work_of_windows_is_in_its_own_unit_and_of_all_ranks(
    start: dict[str, Any], planned: dict[str, Any], ranks: int | None, rate: tuple[float, str]
) -> None:
    own = {**window(10, 1.0), "attempt": 0, "rank": 0}
    observed = observed_windows([own], start, planned, ranks)
    assert observed
    row, (step,) = rate_row(observed), step_rows(observed)
    assert (row["throughput"], row["throughput_unit"]) == rate
    if rate[1] != "steps/s":
        assert (step["throughput"], step["throughput_unit"]) == rate


def test_windows_of_an_earlier_attempt_are_measurements_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left(folder, 0, [START, window(10, 1.0)], attempt=0)
    left(folder, 1, [window(10, 1.0)], attempt=0)
    left(folder, 0, [START, window(10, 3.0)], attempt=1)
    left(folder, 1, [window(10, 3.0)], attempt=1)
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), Planned())
    assert observed and [(o.attempt, o.time_s) for o in observed.steps] == [(0, 1.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("state", "rate", "unit"),
    [
        ({"status": "ok", "wall_time_s": 36.0, "world_size": 4}, 100.0, "runs/h"),
        (
            {"status": "ok", "wall_time_s": 36.0, "world_size": 4, "scaling": "weak"},
            400.0,
            "shares/h",
        ),
        ({"status": "failed", "wall_time_s": 36.0}, None, None),
        ({"status": "ok", "wall_time_s": None}, None, None),
    ],
)
def test_without_records_the_wall_time_counts_and_says_so(
    state: dict[str, Any], rate: float | None, unit: str | None
) -> None:
    row = speed_row(None, {}, state)
    assert (row.get("throughput"), row.get("throughput_unit")) == (rate, unit)
    assert row.get("throughput_source") == (WALL_TIME if rate else None)


@pytest.mark.parametrize(
    ("job", "alone"),
    [
        ({"started": 100.0, "ended": 160.0}, 60.0),
        ({"started": 100.0, "ended": 160.0, "elapsed_s": 7.5}, 7.5),
        ({"started": 160.0, "ended": 100.0}, None),
        ({}, None),
    ],
)
def test_the_wall_time_is_that_of_one_attempt(
    tmp_path: Path, job: dict[str, Any], alone: float | None
) -> None:
    paths = RunPaths(tmp_path)
    paths.job.write_text(json.dumps(job))
    assert wall_time_s(paths, 1) == alone
    assert wall_time_s(paths, 2) is None, "of several attempts it is the time of no run"


@pytest.mark.parametrize(
    "bad",
    [
        {"step": "10", "steps": 10, "wall_s": 1.0},
        {"step": 10, "steps": 10, "wall_s": -1.0},
        {"step": 10, "steps": 10},
        {"step": 10, "steps": 10, "wall_s": "fast"},
    ],
)
def test_a_window_without_its_time_is_no_observation(tmp_path: Path, bad: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    left(folder, 0, [START, bad])
    assert observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), Planned()) is None


def test_the_record_of_another_run_in_a_rank_s_file_is_rejected(tmp_path: Path) -> None:
    left(tmp_path / "run", 1, [window(10, 1.0, run_id="other")])
    records = read_run(RunPaths(tmp_path / "run"), "run")
    assert records.others == []
    assert [r.reason for r in records.rejects] == ["of another run: other"]


P99 = {1: 0.11, 2: 0.3}


def write_window(run: FakeRun, step: int, p99_s: float) -> None:
    run.writer.write(
        "window", step=step, steps=20, wall_s=2.0, work=100, epoch=0, paused_s=0.0,
        step_p50_s=0.1, step_p95_s=0.105, step_p99_s=p99_s, step_max_s=p99_s, warmup=step < 25,
    )  # fmt: skip


@pytest.fixture
def stepped() -> Results:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        write_window(run, 20, 9.0)  # warm-up
        write_window(run, 40, P99[spec.world_size])
        run.train(0, 1, 2).end()
    return collect(plan.paths.folder, write=False)


def test_the_payload_has_steps_and_its_rate_stays_that_of_its_epochs(stepped: Results) -> None:
    for row in stepped.runs.to_dict("records"):
        assert row["throughput_source"] == "epochs of the training"
        assert row["step_p99_s"] == P99[row["world_size"]]
        assert (row["step_p50_s"], row["steps_timed"], row["step_time_s"]) == (0.1, 20, 0.1)
    assert len(stepped.steps) == 4
    assert set(stepped.steps["throughput_unit"]) == {"images/s"}


def test_the_figure_has_a_line_for_each_percentile(stepped: Results) -> None:
    figure = size_figure(stepped, "step_times")
    assert figure is not None
    lines = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert lines == [[0.1, 0.1], [0.105, 0.105], [0.11, 0.3]]
    empty = replace(stepped, runs=stepped.runs.assign(step_p50_s=float("nan")))
    assert size_figure(empty, "step_times") is None


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


def of_steps(steps: object, epoch_end: object, attempt: int = 0) -> dict[str, Any]:
    return {"v": 1, "kind": "window", "attempt": attempt, "steps": steps, "epoch": epoch_end}


def epoch_end(number: int, attempt: int = 0) -> dict[str, Any]:
    return {"v": 1, "kind": "epoch", "attempt": attempt, "epoch": number}


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        ([of_steps(5, None), of_steps(15, 0), epoch_end(0)], 20),  # one epoch, with its warm-up
        ([of_steps(20, 0), epoch_end(0), of_steps(9, 1), of_steps(1, 1), epoch_end(1)], 10),
        ([of_steps(20, 0), epoch_end(0), of_steps(9, 1)], 20),  # the second did not end
        # Stopped within epoch 1, of which the second attempt makes what is left.
        (
            [
                of_steps(20, 0), epoch_end(0), of_steps(9, 1),
                of_steps(11, 1, 1), epoch_end(1, 1), of_steps(20, 2, 1), epoch_end(2, 1),
            ],
            20,
        ),
        ([of_steps(9, None), of_steps(11, 1, 1), epoch_end(1, 1)], None),
        ([of_steps(20, None)], None),
        ([of_steps("20", 0), epoch_end(0)], None),
        # Told at each fifth epoch, or counted from 1.
        ([of_steps(390, 0), epoch_end(0), *[of_steps(150, 1)] * 13, epoch_end(5)], 390),
        ([of_steps(300, None), of_steps(90, 1), epoch_end(1), of_steps(390, 2), epoch_end(2)], 390),
        ([of_steps(390, None), epoch_end(1)], None),
        ([of_steps(20, 0), epoch_end(0), epoch_end(0), of_steps(20, 1), epoch_end(1)], 20),
    ],
)  # fmt: skip
def test_the_steps_of_whole_epochs(records: list[dict[str, Any]], steps: int | None) -> None:
    assert steps_of_epoch(RunRecords(records)) == steps


def test_the_time_follows_from_the_steps_of_a_meter() -> None:
    records = RunRecords([of_steps(20, 0), epoch_end(0)])
    speed = {"step_time_s": 0.5}
    metered = Observed(windows=True, source="meter")
    assert epoch_time(metered, records, speed) == {"time_per_epoch_s": 10.0}
    for other in (None, Observed(source="metric lines"), Observed(windows=True, source=TRAINING)):
        assert epoch_time(other, records, speed) == {}
    assert epoch_time(metered, records, {}) == {}


def found(works: tuple[float, ...], more: tuple[float | None, ...] = ()) -> list[Any]:
    """Sizes of a metered series whose epochs have this work, and the runs of another one."""
    rows = []
    for series, amounts in (("own", works), ("other", more)):
        for at, work in enumerate(amounts):
            rate = 100.0 * 2**at
            rows.append(
                {
                    "run_id": f"{series}{at}", "series": series, "status": "ok", "nodes": 1,
                    "ranks_per_node": 2**at, "world_size": 2**at, "throughput": rate,
                    "throughput_unit": "samples/s", "step_time_s": 0.25,
                    "time_per_epoch_s": work / rate if work else None,
                }
            )  # fmt: skip
    return sizes(frame(rows, RESULTS))


def test_sizes_with_the_same_epoch_have_its_time() -> None:
    one, two = found((1000.0, 1008.0))
    assert (one.time_of, one.time_s, one.time_amount) == (EPOCH, 10.0, 1000.0)
    assert (two.time_of, two.time_s) == (EPOCH, pytest.approx(5.04))
    assert one.step_time_s == 0.25


def test_epochs_that_grow_with_the_ranks_or_that_others_lack_are_not_compared() -> None:
    for made in (found((1000.0, 2000.0)), found((1000.0, 1000.0), (None, None))):
        assert {size.time_of for size in made} == {"1,000 samples"}
        assert [size.time_s for size in made[:2]] == [10.0, 5.0]


VALUES = [{"v": 1, "kind": "value", "name": f"n{i}"} for i in range(9)]
RATE = {"step": 10, "tokens_per_s": 4000.0}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"step": 1, "lr": 2.0}, {"note": "x"}], "2 [METRIC] lines are in no table (lr, note)"),
        ([{"step": 5}], "1 [METRIC] line is in no table (step)"),
        (VALUES, "9 [METRIC] lines are in no table (n0, n1, n2, n3, n4, ...)"),
        ([{"v": 1, "kind": "later"}], "1 [METRIC] line is in no table (later)"),
        ([RATE, {"epoch": 1, "anything": 2}, {"v": 1, "kind": "window"}], ""),
    ],
)  # fmt: skip
def test_lines_that_are_in_no_table_are_counted_and_named(
    records: list[dict[str, Any]], says: str
) -> None:
    observed = observed_metrics([RATE], 1, {})
    assert unused_lines(RunRecords(records), observed) == says


@pytest.mark.parametrize(
    ("run", "unit", "of"),
    [
        ({"strategy": "ddp", "status": "failed", "global_batch_size": 8}, "images/s", "epoch"),
        ({"strategy": "ddp", "status": "failed"}, "runs/h", "run"),  # a command, of ddp.py
        ({"strategy": "train", "status": "failed"}, "runs/h", "run"),
        ({"throughput": 0.5, "throughput_unit": "tokens/s"}, "tokens/s", "1 token"),
        ({"throughput": 0.05, "throughput_unit": "tokens/s"}, "tokens/s", "0.1 tokens"),
        ({"throughput": 5.0, "throughput_unit": "tokens/s"}, "tokens/s", "10 tokens"),
    ],
)
def test_what_a_time_is_of(run: dict[str, Any], unit: str, of: str) -> None:
    same = {"series": "s", "status": "ok", "nodes": 1, "ranks_per_node": 1, "world_size": 1}
    (size,) = sizes(frame([{"run_id": "r", **same, **run}], RESULTS))
    assert (size.throughput_unit, size.time_of) == (unit, of)


def test_the_unit_of_steps_is_that_of_the_run_s_rate() -> None:
    """Several steps of an optimizer on one batch: the work of some windows only is known."""
    first = Observation(steps=5, time_s=10.0, work=40, warmup=True)
    others = [Observation(steps=10, time_s=2.0)] * 2
    observed = Observed(steps=[first, *others], unit="samples", windows=True)
    row = rate_row(observed)
    assert (row["throughput"], row["throughput_unit"]) == (5.0, "steps/s")
    found = [(r["throughput"], r["throughput_unit"]) for r in step_rows(observed)]
    assert found == [(0.5, "steps/s"), (5.0, "steps/s"), (5.0, "steps/s")]
