"""A run that outlived its launcher is not timed beside another one."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import cli
from jobkit.launch.local import refuse_orphans
from jobkit.paths import StudyPaths, write_json
from jobkit.processes import process_start
from jobkit.spec.study import Study

GONE = {"pid": (1 << 22) - 1, "pid_start": 1}


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as made:
        yield made.pid
        made.kill()


def study_of(folder: Path, run_id: str, of: int, **more: Any) -> StudyPaths:
    study = StudyPaths(folder)
    study.run(run_id).folder.mkdir(parents=True)
    known = {"launcher": "local", "host": socket.gethostname(), "ended": None, "pid": of}
    write_json(study.run(run_id).job, {**known, "pid_start": process_start(of), **more})
    return study


@pytest.mark.parametrize("child", [False, True])
def test_nothing_starts_beside_a_run_that_runs(tmp_path, pid, child, monkeypatch, capsys) -> None:
    """Itself, or what it had started where it was killed."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    of_child = {**GONE, "child": {"pid": pid, "pid_start": process_start(pid)}} if child else {}
    (run_id,) = Study.of_command(("true",), name="s", gpus=(1,)).expand().runs
    study = study_of(tmp_path / "s", run_id, pid, **of_child)
    assert cli.main(["--site", "local", "--name", "s", "--gpus", "1", "2", "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run_id} of s still runs, as process {pid}, " in line and line.endswith(f"kill {pid}")
    assert not study.plan.exists()


@pytest.mark.parametrize(
    "more", [{"ended": 1.0}, {"launcher": "slurm"}, {"host": "elsewhere"}, {"pid_start": 1}, GONE]
)
def test_others_are_none(tmp_path, pid, more, monkeypatch) -> None:
    """Another user's process is never named either."""
    refuse_orphans(study_of(tmp_path / "a", "r", pid, **more))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refuse_orphans(study_of(tmp_path / "b", "r", pid))


def test_one_that_ends_meanwhile_is_none(tmp_path, pid, monkeypatch) -> None:
    monkeypatch.setattr("jobkit.launch.local.is_at_work", lambda job: True)
    refuse_orphans(study_of(tmp_path / "s", "r", pid, **GONE, child=None))
