"""status, cancel, collect and plot of single jobs: a folder of runs without a plan."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import cancel, status
from jobkit.paths import RunPaths, StudyPaths, logs_root, write_json
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun, make_plan
from support.place import until
from support.stub_srun import RUN, Kit


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    folder = logs_root() / "single"
    spec = RunSpec(epochs=3, dataset="synthetic", train_samples=8192)
    FakeRun(folder, "done", spec).begin().train(0, 1, 2).end()
    return folder


def test_status_lists_each_job_and_cancel_ends_none(single, capsys) -> None:
    paths = RunPaths(single / "waits")
    paths.folder.mkdir()
    words = {"command": ["python", "train.py"]}
    write_json(paths.spec, {"v": 1, "study": "single", "run_id": "waits", "spec": words})
    write_json(paths.submission, {"job_id": "17", "submitted": 100.0, "shared": False})
    assert status.main(["single", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {r["run_id"]: r["status"] == "ok" for r in runs} == {"done": True, "waits": False}
    assert cancel.main(["single"]) == 2
    assert "end one with scancel JOBID" in capsys.readouterr().err


def test_logs_that_exist_already_are_no_runs(capsys) -> None:
    """A list of logs is newer than the study, and neither to be watched nor to be ended."""
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    os.utime(plan.paths.plan, (1.0, 1.0))
    StudyPaths.named("from-logs").folder.mkdir(parents=True)
    write_json(StudyPaths.named("from-logs").given_logs, {"v": 1, "logs": []})
    for command in (status, cancel):
        assert command.main([]) == 0
        assert plan.paths.folder.name in capsys.readouterr().out
        assert command.main(["from-logs"]) == 2
        assert "from-logs has no plan.json" in capsys.readouterr().err


# It ends with the file beside it, also where nobody is left who could end it.
WAITS = """
import pathlib, time
here = pathlib.Path(__file__)
here.with_name("begun").touch()
while here.with_name("go on").exists(): time.sleep(0.05)
"""


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[Path]:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    (tmp_path / "go on").touch()
    yield script
    (tmp_path / "go on").unlink(missing_ok=True)


def only_state(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert status.main(["single", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    return row


def test_a_run_that_was_killed_does_not_run(tmp_path, waits, monkeypatch, capsys) -> None:
    """Nothing could be written of its end, and its files are new: the process table knows."""
    environ = Kit(tmp_path).environ(JOBKIT_LOGS=str(logs_root()))
    words = ["bash", str(RUN), "--nproc-per-node=1", "--", sys.executable, str(waits)]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, cwd=tmp_path)
    until(waits.with_name("begun").exists, "the start of its command")
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    row = only_state(capsys)
    assert (row["status"], row["reason"]) == ("running", f"process {process.pid}")
    process.send_signal(signal.SIGKILL)
    assert process.wait(300) == -9
    row = only_state(capsys)
    assert row["status"] == "running"  # what it has started goes on
    waits.with_name("go on").unlink()
    until(lambda: only_state(capsys)["status"] != "running", "its end")
    row = only_state(capsys)
    assert row["status"] == "failed" and "exited without a run_end record" in row["reason"]
