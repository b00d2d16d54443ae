"""Windows that the ranks of a run recorded: what collect makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.measured import WALL_TIME, observed_of, speed_row, wall_time_s
from jobkit.analysis.collect.records import read_run
from jobkit.analysis.collect.steps import rate_row, step_rows
from jobkit.analysis.collect.windows import observed_windows
from jobkit.metric.line import encode
from jobkit.paths import RunPaths


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


def test_a_rank_that_is_missing_leaves_the_work_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left(folder, 0, [START, window(10, 1.0), window(20, 1.0)])
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), Planned())
    assert observed
    row = rate_row(observed)
    assert (row["throughput"], row["throughput_unit"]) == (10.0, "steps/s")


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


def test_the_study_s_own_words_on_work_win(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left(folder, 0, [START, {"step": 10, "steps": 10, "wall_s": 1.0}])
    left(folder, 1, [{"step": 10, "steps": 10, "wall_s": 1.0}])
    spec = Planned(unit="tokens", work_per_step=4096)
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), "run"), spec)
    assert observed
    row = rate_row(observed)
    assert (row["throughput"], row["throughput_unit"]) == (40960.0, "tokens/s")


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


def test_key_value_lines_are_a_rate(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [f"[METRIC] step={n} tokens_per_s={4000 + n}\n" for n in (10, 20, 30)]
    (folder / "train.log").write_text("".join(lines))
    observed = observed_of(RunPaths(folder), read_run(RunPaths(folder), None), Planned())
    assert observed
    row = rate_row(observed)
    assert row["throughput"] == pytest.approx(2 / (1 / 4020 + 1 / 4030))
    assert row["throughput_unit"] == "tokens/s"


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


def test_epochs_of_the_training_are_images_per_second() -> None:
    row = speed_row(None, {"images_per_s": 900.0}, {"status": "ok", "wall_time_s": 1.0})
    assert (row["throughput"], row["throughput_unit"]) == (900.0, "images/s")


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
    folder = tmp_path / "run"
    left(folder, 1, [window(10, 1.0)])
    file = folder / "metrics" / "0.r1.jsonl"
    record = json.loads(file.read_text())
    record.pop("crc")
    file.write_text(encode({**record, "run_id": "other"}) + "\n")
    records = read_run(RunPaths(folder), "run")
    assert records.others == []
    assert [r.reason for r in records.rejects] == ["of another run: other"]
