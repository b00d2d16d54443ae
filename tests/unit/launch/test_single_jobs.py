"""status, cancel, collect and plot of single jobs: a folder of runs without a plan."""

import json
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.launch import cancel
from jobkit.launch.follow import status
from jobkit.paths import RunPaths, logs_root, write_json
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Path:
    """One run that is done, and one that waits for Slurm."""
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    folder = logs_root() / "single"
    spec = RunSpec(epochs=3, dataset="synthetic", train_samples=8192)
    FakeRun(folder, "done", spec).begin().train(0, 1, 2).end()
    return folder


def waiting(folder: Path) -> None:
    paths = RunPaths(folder / "waits")
    paths.folder.mkdir()
    words = {"command": ["python", "train.py"]}
    write_json(paths.spec, {"v": 1, "study": "single", "run_id": "waits", "spec": words})
    write_json(paths.submission, {"job_id": "17", "submitted": 100.0, "shared": False})


def test_status_lists_each_job(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting(single)
    assert status.main(["single", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {r["run_id"]: r["status"] for r in said["runs"]}["done"] == "ok"
    assert {r["run_id"] for r in said["runs"]} == {"done", "waits"}
    assert status.main([str(single)]) == 0
    assert "waits" in capsys.readouterr().out


def test_cancel_wants_one_of_them(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cancel.main(["single"]) == 2
    assert "none is running or pending" in capsys.readouterr().err
    waiting(single)
    assert cancel.main(["single"]) == 2
    assert "name the one to end, as: python -m jobkit cancel waits" in capsys.readouterr().err


def test_collect_makes_their_tables(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_main(["single"]) == 0
    assert (single / "results.csv").exists() and (single / "epochs.csv").exists()
    assert "1 of 1 runs ok" in capsys.readouterr().out


def test_a_folder_in_which_no_job_can_be_read_is_one_line(
    single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (single / "done" / "spec.json").unlink()
    assert status.main(["single"]) == 2
    error = capsys.readouterr().err
    assert "no run in it has a spec.json" in error and error.count("\n") == 1
