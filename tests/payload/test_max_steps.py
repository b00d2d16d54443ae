"""--max-steps ends a run as ok, also within an epoch; the windows have every step of every rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.measured import observed_of
from jobkit.analysis.collect.records import read_run
from support.cuts import DATA, PER_EPOCH, SAMPLES, actions, final, measured, same, write_models
from support.rigs import Result, Start

STEPS = PER_EPOCH + 3
PART = 3 * 16  # samples of the second epoch
HOW = (*DATA, "--epochs", "4", "--global-batch-size", "16", "--breakdown-iterations", "0")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def short(forge: Start, own: Path) -> Result:
    words = [*HOW, "--model", "own_models:noisy", "--max-steps", str(STEPS)]
    return forge(2, *words, "--checkpoint-every", "4", cwd=str(own))


def windows(result: Result, rank: int, attempt: int = 0) -> list[dict[str, Any]]:
    name = f"{attempt}.jsonl" if rank == 0 else f"{attempt}.r{rank}.jsonl"
    lines = (result.paths.metrics_folder / name).read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "window"]


def test_a_run_ends_as_ok_after_its_steps(short: Result) -> None:
    assert short.codes == [0, 0], short.out
    assert short.outcome is not None and short.outcome["status"] == "ok"
    epochs = short.records("epoch")
    assert [(e["epoch"], e["iterations"]) for e in epochs] == [(0, PER_EPOCH), (1, 3)]
    # The warm-up of the process is not timed; all steps of the second epoch are.
    assert epochs[1]["timed_images"] == PART
    assert actions(short)[-1] == ("saved", STEPS)
    # The schedule ends with the steps: a quarter of them rises to the peak, the others fall.
    assert epochs[1]["lr"] == pytest.approx(0.05 / (0.75 * STEPS))


def test_the_windows_have_each_step_of_each_rank_once(short: Result) -> None:
    for rank in (0, 1):
        found = windows(short, rank)
        assert sum(w["steps"] for w in found) == STEPS == found[-1]["step"]
        assert {w["epoch"] for w in found} == {0, 1}
        assert [w["warmup"] for w in found] == sorted((w["warmup"] for w in found), reverse=True)
        assert all(w["wall_s"] >= w["step_max_s"] >= w["step_p50_s"] > 0 for w in found)
    work = sum(w["work"] for rank in (0, 1) for w in windows(short, rank))
    assert work == SAMPLES + PART
    records = read_run(short.paths, None)
    observed = observed_of(short.paths, records, None)
    assert observed and (observed.unit, observed.source) == ("images", "training")
    assert records.lost == 0


def test_cut_and_resumed_it_is_the_run_that_was_not_cut(
    forge: Start, own: Path, short: Result
) -> None:
    words = [*HOW, "--model", "own_models:noisy", "--max-steps", str(STEPS)]
    words += ["--checkpoint-every", "4"]
    cut = forge(2, *words, cwd=str(own), env={"JOBKIT_FAULT": f"raise@{PER_EPOCH + 2}:0:0"})
    assert cut.codes != [0, 0]
    last = forge(2, *words, "--attempt", "1", run_dir=cut.paths.folder, cwd=str(own))
    assert last.codes == [0, 0], last.out
    assert same(final(short), final(last)) == []
    assert sorted(set(measured(last, 2))) == measured(short)
    done = forge(2, *words, "--resume-from", str(last.paths.folder), cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert "already complete" in done.out
    assert done.records("epoch") == []


def test_a_longer_run_continues_in_the_midst_of_the_epoch(
    forge: Start, own: Path, short: Result
) -> None:
    words = [*HOW, "--model", "own_models:noisy", "--max-steps", str(2 * PER_EPOCH)]
    words += ["--resume-from", str(short.paths.folder)]
    longer = forge(2, *words, cwd=str(own))
    assert longer.codes == [0, 0], longer.out
    assert actions(longer) == [("loaded", STEPS)]
    (epoch,) = longer.records("epoch")
    assert (epoch["epoch"], epoch["iterations"], epoch["begun_at"]) == (1, PER_EPOCH, PART)
    # The clock of an epoch that is continued tells the windows of waits and pauses too.
    assert all(w["data_wait_s"] is not None for rank in (0, 1) for w in windows(longer, rank))
