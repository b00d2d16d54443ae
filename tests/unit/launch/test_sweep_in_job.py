"""The runs of a study one after the other in one allocation: restarts, requeueing, what is left."""

from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import task
from jobkit.outcome.state import RunState


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls sweep_in_job; each run ends with the codes that are given for it, one per start."""

    def call(codes, max_restarts=None, requeued=0, ok="") -> tuple[int, list[str], list[str]]:
        """How many failed, the runs that were started, and the jobs that were requeued."""
        started, requeues = list[str](), list[str]()
        left = {name: iter(each) for name, each in codes.items()}

        def run(folder: Path, *_: Any) -> tuple[int, bool]:
            started.append(folder.name)
            return next(left[folder.name]), False

        def state(paths: Any) -> RunState:
            return RunState(status="ok" if paths.folder.name in ok else "preempted")

        monkeypatch.setattr(task, "_run", run)
        monkeypatch.setattr(task, "Signals", lambda: None)
        monkeypatch.setattr(task, "run_state", state)
        monkeypatch.setattr(task.subprocess, "run", lambda words: requeues.append(words[-1]))
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
        runs = [(str(tmp_path / name), ["true"]) for name in codes]
        return task.sweep_in_job(runs, max_restarts), started, requeues

    return call


@pytest.mark.parametrize(
    ("max_restarts", "requeued", "requeues"),
    [(None, 0, 1), (None, 2, 1), (None, 3, 0), (1, 0, 1), (1, 1, 0), (0, 0, 0)],
)
def test_an_early_stop_requeues_the_job(job, max_restarts, requeued, requeues) -> None:
    bad, started, found = job({"a": [0], "b": [75], "c": [0]}, max_restarts, requeued, ok="a")
    assert bad == 1 and found == ["17"] * requeues
    assert started == (["a", "b"] if not requeued else ["b"])  # what is done is done


def test_a_crash_starts_the_run_again_and_the_next_one_has_its_turn(job: Any) -> None:
    assert job({"a": [1, 137, 0], "b": [0]}, 2) == (0, ["a", "a", "a", "b"], [])
    assert job({"a": [1, 1], "b": [0]}, 1) == (1, ["a", "a", "b"], [])
    assert job({"a": [2], "b": [0]}, 2) == (1, ["a", "b"], [])  # bad input stays bad


def test_in_its_first_start_a_job_runs_what_was_ok_before(job: Any) -> None:
    assert job({"a": [0], "b": [0]}, ok="a") == (0, ["a", "b"], [])
