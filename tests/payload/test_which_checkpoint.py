"""Which checkpoints of its run an attempt may resume from, and which of them are removed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobkit.paths import RunPaths, write_json
from jobkit.payload.checkpoint import found_in, prune
from jobkit.payload.resume import of_own_run
from jobkit.payload.run import candidates


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of five attempts, which left a checkpoint of iterations 10 and 20 each."""
    made = RunPaths(tmp_path / "r")
    for attempt in range(5):
        (made.attempts / str(attempt)).mkdir(parents=True)
        for iteration in (10, 20):
            (made.checkpoints / f"{iteration:08d}-{attempt}").mkdir(parents=True)
    return made


def names(folders: list[Path]) -> list[str]:
    return [folder.name.lstrip("0") for folder in folders]


def test_those_of_earlier_attempts_the_newest_first(paths: RunPaths) -> None:
    (paths.checkpoints / ".00000030-1.tmp").mkdir()  # not whole
    assert names(of_own_run(paths, 2)) == ["20-1", "10-1", "20-0", "10-0"]
    assert of_own_run(paths, 0) == []


def test_none_of_another_training(paths: RunPaths) -> None:
    write_json(paths.outcome(1), {"status": "ok"})
    assert names(of_own_run(paths, 3)) == ["20-2", "10-2"]
    write_json(paths.outcome(1), {"status": "failed"})
    assert len(of_own_run(paths, 3)) == 6


def test_the_runs_own_are_taken_before_those_of_another_run(paths, tmp_path) -> None:
    (tmp_path / "other" / "checkpoints" / "00000030-0").mkdir(parents=True)
    job: Any = SimpleNamespace(attempt=0, resume_from=tmp_path / "other")
    assert names(candidates(job, paths)) == ["30-0"]
    job.attempt = 1
    assert names(candidates(job, paths)) == ["20-0", "10-0"]


def test_the_newest_stay_and_those_of_a_later_attempt(paths: RunPaths) -> None:
    prune(paths.checkpoints, 3, keep=1)
    assert names(found_in(paths.checkpoints)) == ["20-4", "10-4", "20-3"]
