"""From the records of a run to its numbers: windows, steps, epochs, rates, what is in no table."""

from typing import Any

from jobkit.analysis.collect.lines import observed_metrics
from jobkit.analysis.collect.records import RunRecords, read_run
from jobkit.analysis.collect.results import collect
from jobkit.analysis.collect.rows import (
    WALL_TIME,
    observed_of,
    rate_alike,
    result_row,
    speed_row,
    unused_lines,
    wall_time_s,
)
from jobkit.analysis.collect.steps import (
    Observation,
    Observed,
    observed_windows,
    rate_row,
    step_rows,
)
from jobkit.outcome.state import RunState
from jobkit.paths import RunPaths
from jobkit.program.lines import encode
from support.fake_study import FakeRun, make_plan

START = {"kind": "run_start", "world_size": 2, "unit": "samples", "source": "meter"}
Windows = list[dict[str, Any]]


def window(step: int, wall_s: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "steps": 10, "wall_s": wall_s, "work": 100, **more}


def observed(*ranks: Windows) -> Observed:
    """What is observed of the windows that two ranks left."""
    own = [{"attempt": 0, "rank": n} | one for n, windows in enumerate(ranks) for one in windows]
    found = observed_windows(own, START, {})
    assert found
    return found


def test_the_slowest_rank_counts_and_the_work_of_all_is_added_up() -> None:
    """A window in which one rank warms up is not compared."""
    fast = [window(10, 9.0), window(20, 1.0)]
    slow = [window(10, 9.0, warmup=True), window(20, 2.0, data_wait_s=0.5)]
    found = observed(fast, slow)
    row = rate_row(found)
    assert (row["throughput"], row["throughput_unit"]) == (200 / 2.0, "samples/s")
    assert (row["step_time_s"], row["data_wait_share"]) == (0.2, 0.25)
    assert [r["warmup"] for r in step_rows(found)] == [True, False]


LONG = [window(10, 1.0), window(40, 3.0, steps=30, work=300)]
OTHER = [window(20, 1.5), window(30, 1.0), window(40, 1.0)]
WHOLE, LOSSY = ([window(n, 1.0) for n in ends] for ends in ((10, 20, 30, 40), (10, 30)))
LOST = [(10, 200, 10, 1.0), (30, None, 20, 2.0), (40, None, 10, 1.0)]


def test_ranks_share_what_lies_between_the_steps_at_which_all_ended_a_window() -> None:
    for ranks, steps in (
        # Each spaces its windows by its own clock; a rate of parts of them would be too low.
        ((LONG, [window(10, 1.0), *OTHER]), [(10, 200, 10, 1.0), (40, 600, 30, 3.5)]),
        # A lost window of one rank leaves its work unknown.
        ((WHOLE, LOSSY), LOST),
        ((LOSSY, WHOLE), LOST),
    ):
        assert [(o.step, o.work, o.steps, o.time_s) for o in observed(*ranks).steps] == steps


def test_windows_of_all_attempts_and_ranks_count_and_those_of_another_run_do_not(tmp_path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.metrics_folder.mkdir(parents=True)
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        common = {"v": 1, "study": "s", "run_id": "run", "t": 1.0, "attempt": attempt, "rank": rank}
        made = [START] * (not rank)
        made += [window(10, 1.0 + attempt), window(20, 1.0, run_id="other")]
        lines = [encode({"kind": "window", **common, "seq": n, **r}) for n, r in enumerate(made)]
        name = f"{attempt}.r{rank}.jsonl" if rank else f"{attempt}.jsonl"
        (paths.metrics_folder / name).write_text("\n".join([*lines, ""]))
    records = read_run(paths, "run")
    found = observed_of(paths.log, tmp_path, records, None, None, 2)
    steps = [(o.attempt, o.time_s, o.work) for o in found.steps] if found else []
    assert steps == [(0, 1.0, 200), (1, 2.0, 200)]
    assert str(records.problems).count("first: of another run: other") == 4


def test_the_work_of_windows_is_in_its_own_unit_and_of_all_ranks() -> None:
    alone = {"world_size": 1}
    samples, tokens = alone | {"unit": "samples"}, {"unit": "tokens"}
    own = {**window(10, 1.0), "attempt": 0, "rank": 0}
    for start, planned, ranks, rate in (
        # What the study states counts, not what the program counted in another unit.
        (samples, tokens | {"work_per_step": 4096.0}, None, (4096.0 * 10, "tokens/s")),
        (samples, tokens, None, (100.0, "samples/s")),
        (alone, {}, None, (100.0, "units/s")),
        ({}, {}, 8, (10.0, "steps/s")),  # cut off: the windows are of one of eight ranks
    ):
        found = observed_windows([own], start, planned, ranks)
        assert found
        for row in (rate_row(found), *step_rows(found)):
            assert (row["throughput"], row["throughput_unit"]) == rate


def test_the_unit_of_steps_is_that_of_the_run_s_rate() -> None:
    """Several steps of an optimizer on one batch: the work of some windows only is known."""
    first = Observation(steps=5, time_s=10.0, work=40, warmup=True)
    others = [Observation(steps=10, time_s=2.0)] * 2
    found = Observed(steps=[first, *others], unit="samples", windows=True)
    rows = [rate_row(found), *step_rows(found)]
    assert [row["throughput"] for row in rows] == [5.0, 0.5, 5.0, 5.0]
    assert {row["throughput_unit"] for row in rows} == {"steps/s"}


def test_a_long_run_has_at_most_a_thousand_rows() -> None:
    windows = [Observation(step=n, steps=1, time_s=1.0) for n in range(1, 2501)]
    assert [r["step"] for r in step_rows(Observed(steps=windows))] == [*range(1, 2501, 3)]


ENDED = {"status": "ok", "wall_time_s": 36.0, "world_size": 4}


def test_without_records_the_wall_time_counts_and_says_so() -> None:
    for changed, rate in (
        ({}, (100.0, "runs/h", WALL_TIME)),
        ({"scaling": "weak"}, (400.0, "shares/h", WALL_TIME)),
        ({"status": "failed"}, ()),
        ({"wall_time_s": None}, ()),
    ):
        assert tuple(speed_row(None, ENDED | changed).values()) == rate


def test_rates_of_one_size_are_of_one_kind() -> None:
    """The median of 852 samples/s and 272 runs/h was "562.1 samples/s"."""
    steps = {"throughput": 852.0, "throughput_unit": "samples/s", "throughput_source": "auto"}
    warm = rate_row(observed([window(10, 9.0, warmup=True)]))
    whole, other = speed_row(None, ENDED), steps | {"throughput_unit": "steps/s"}
    for rates, kept in (
        ([whole, steps, whole], [1]),
        ([whole, whole], [0, 1, 2]),
        ([other, steps, steps], [1, 2]),
        ([steps, steps | {"throughput_source": WALL_TIME}], [0]),
        ([steps, steps | {"throughput_source": warm["throughput_source"]}, steps], [0, 2]),
    ):
        rows = [{"series": "a", "status": "ok", "world_size": 2, **own} for own in rates]
        rows.append({"series": "a", "status": "ok", "world_size": 4, **whole})
        rate_alike(rows)
        assert [i for i, row in enumerate(rows) if row["throughput"]] == kept


def test_the_wall_time_is_that_of_one_attempt() -> None:
    for elapsed, alone in ((7.5, 7.5), (-1.0, None), (None, None), ("7.5", None)):
        job = {"elapsed_s": elapsed}
        assert (wall_time_s(job, 1), wall_time_s(job, 2)) == (alone, None)


def test_a_training_has_the_rate_of_its_steps_as_any_program() -> None:
    """Where a rank left no windows, by the samples of an epoch: on 2 ranks 8,192 in 16 steps."""
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        for step, seconds in ((20, 9.0), (40, 2.0), (60, 3.0)):  # the first of the warm-up
            made = window(step, seconds, steps=20, work=4000, warmup=step < 25)
            run.writer.write("window", **made)
        run.end()
    found = collect(plan.paths.folder, write=False)
    runs = found.runs[["throughput", "throughput_unit", "throughput_source", "step_time_s"]]
    rates = 8000 / 5, 512 / 0.125
    assert runs.to_numpy().tolist() == [[rate, "images/s", "meter", 0.125] for rate in rates]
    assert found.runs["time_per_epoch_s"].tolist() == [8192 / rate for rate in rates]
    assert found.steps["throughput_unit"].tolist() == ["images/s"] * 6


def row(*records: tuple[str, dict[str, Any]], attempt: int = 0) -> dict[str, Any]:
    """The columns of a run with these records; it had 1,000 samples per epoch."""
    common = {"v": 1, "run_id": "r", "attempt": attempt, "rank": 0}
    start = {"kind": "run_start", "train_samples": 1000, **common}
    made = [start, *({"kind": kind, **common, **fields} for kind, fields in records)]
    for seq, record in enumerate(made):
        record |= {"seq": seq, "t": 100.0 + seq}
    state = RunState(status="ok", attempts=attempt + 1)
    return dict(result_row(None, state, RunRecords(records=made)))


def epoch(number: int, rate: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "epoch", {"epoch": number, "images_per_s": rate, **fields}


def test_losses_are_those_of_the_end_and_before_it_those_of_the_last_epoch() -> None:
    last = epoch(1, 100.0, val_loss=0.5, val_accuracy=0.7)
    ended = row(epoch(0, 1.0, val_accuracy=0.9), last, ("run_end", {"val_loss": 0.4}))
    assert (ended["val_loss"], ended["val_accuracy"], ended["best_val_accuracy"]) == (0.4, 0.7, 0.9)
    assert row(last)["val_loss"] == 0.5
    assert row(("run_end", {"val_loss": 0.4, "attempt": 0}), last, attempt=1)["val_loss"] == 0.5


VALUES = [{f"n{i}": i} for i in range(9)]
RATE = {"step": 10, "tokens_per_s": 4000.0}


def test_lines_that_are_in_no_table_are_counted_and_named() -> None:
    records: list[dict[str, Any]]
    for records, says in (
        ([{"step": 1, "lr": 2.0}, {"note": "x"}], "2 [METRIC] lines are in no table (lr, note)"),
        ([{"step": 5}], "1 [METRIC] line is in no table (step)"),
        (VALUES, "9 [METRIC] lines are in no table (n0, n1, n2, n3, n4, ...)"),
        ([RATE, {"epoch": 1, "anything": 2}, {"v": 1, "kind": "window"}], ""),
        # Beside epochs that the run records itself.
        ([{"v": 1, "kind": "epoch", "epoch": 1}, {"epoch": 1, "loss": 2}],
         "1 [METRIC] line is in no table (loss)"),
    ):  # fmt: skip
        assert unused_lines(RunRecords(records), observed_metrics([RATE], 1, {})) == says
