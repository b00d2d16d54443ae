"""status, cancel, collect and plot of single jobs: a folder of runs without a plan."""

import json
import os
from pathlib import Path

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.launch import cancel, status
from jobkit.paths import RunPaths, StudyPaths, logs_root, write_json
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun, make_plan


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


def test_single_jobs_are_collected(single: Path) -> None:
    """Each by its spec.json or, without one, by what it wrote at its start."""
    (single / "done").rename(single / "renamed")
    FakeRun(single, "other", RunSpec(strategy="ddp", ranks_per_node=2)).begin().train(0, 1).end()
    RunPaths(single / "other").spec.unlink()
    results = collect("single")
    assert dict(zip(results.runs["run_id"], results.runs["world_size"], strict=True)) == {
        "renamed": 1,
        "other": 2,
    }
    assert results.ok and len(results.epochs) == 5


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
