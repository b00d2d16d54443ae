"""The runs of a study one after the other in one allocation: requeueing, what is left."""

from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import task
from jobkit.outcome.state import RunState


@pytest.mark.parametrize(
    ("codes", "requeued", "ok", "bad", "started"),
    [
        ({"a": 0, "b": 75, "c": 0}, 0, "", 1, "ab"),  # b has requeued the job
        ({"a": 0, "b": 75, "c": 0}, 1, "a", 1, "b"),  # what is done is done
        ({"a": 137, "b": 2, "c": 0}, 0, "", 2, "abc"),  # the next one has its turn
        ({"a": 0, "b": 0}, 0, "a", 0, "ab"),  # in its first start a job runs what was ok before
    ],
)
def test_what_a_job_runs(codes, requeued, ok, bad, started, tmp_path, monkeypatch) -> None:
    seen: list[str] = []

    def run(folder: Path, *_: Any) -> tuple[int, bool]:
        seen.append(folder.name)
        return codes[folder.name], False

    status = {name: RunState(status="ok" if name in ok else "preempted") for name in codes}
    monkeypatch.setattr(task, "_run", run)
    monkeypatch.setattr(task, "Signals", lambda: None)
    monkeypatch.setattr(task, "run_state", lambda paths: status[paths.folder.name])
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
    assert task.sweep_in_job([(str(tmp_path / name), ["true"]) for name in codes]) == bad
    assert "".join(seen) == started
