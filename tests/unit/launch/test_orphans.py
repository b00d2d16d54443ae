"""A run that outlived its launcher is not timed beside another one."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import cli
from jobkit.launch.local import orphans
from jobkit.paths import StudyPaths, write_json
from jobkit.processes import process_start
from jobkit.spec.plan import Study

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
def test_it_is_named_with_how_to_end_it(tmp_path: Path, pid: int, child: bool) -> None:
    """Itself, or what it had started where it was killed."""
    of_child = {**GONE, "child": {"pid": pid, "pid_start": process_start(pid)}} if child else {}
    study = study_of(tmp_path / "demo", "ddp-1", pid, **of_child)
    with pytest.raises(ValueError, match=rf"ddp-1 of demo still runs, as process {pid}, .*kill"):
        orphans.refuse(study)


@pytest.mark.parametrize(
    "more", [{"ended": 1.0}, {"launcher": "slurm"}, {"host": "elsewhere"}, {"pid_start": 1}, GONE]
)
def test_others_are_none(tmp_path: Path, pid: int, more: dict[str, Any]) -> None:
    orphans.refuse(study_of(tmp_path, "r", pid, **more))


def test_another_users_process_is_never_named(
    tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    orphans.refuse(study_of(tmp_path, "r", pid))


def test_the_study_called_again_is_refused_and_starts_nothing(
    tmp_path: Path,
    pid: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    (run_id,) = Study.of_command(("true",), name="s", gpus=(1,)).expand().runs
    study = study_of(tmp_path / "logs" / "s", run_id, pid)
    assert cli.main(["--site", "local", "--name", "s", "--gpus", "1", "2", "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"kill {pid}") and not study.plan.exists()
