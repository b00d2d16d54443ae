"""A run that outlived its launcher is not timed beside another one."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import cli
from jobkit.launch.local import orphans
from jobkit.outcome.liveness import process_start
from jobkit.paths import StudyPaths, write_json

RUN = "ddp-n1-g1"


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as made:
        yield made
        made.kill()


def job_of(pid: int, **more: Any) -> dict[str, Any]:
    known = {"launcher": "local", "host": socket.gethostname(), "ended": None}
    return {**known, "pid": pid, "pid_start": process_start(pid), **more}


def written(tmp_path: Path, job: dict[str, Any]) -> StudyPaths:
    study = StudyPaths(tmp_path / "demo")
    study.run(RUN).folder.mkdir(parents=True)
    write_json(study.run(RUN).job, job)
    return study


def test_it_is_named_with_how_to_end_it(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    study = written(tmp_path, job_of(process.pid))
    with pytest.raises(ValueError, match=f"kill {process.pid}$") as error:
        orphans.refuse(study)
    assert f"{RUN} of demo still runs, as process {process.pid}" in str(error.value)
    process.send_signal(signal.SIGKILL)
    process.wait()
    orphans.refuse(study)


def test_its_child_is_named_where_it_was_killed_itself(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    child = {"pid": process.pid, "pid_start": process_start(process.pid)}
    with subprocess.Popen(["true"]) as gone:
        job = job_of(gone.pid, child=child)
        gone.wait()
    with pytest.raises(ValueError, match=f"kill {process.pid}$"):
        orphans.refuse(written(tmp_path, job))


@pytest.mark.parametrize(
    "more", [{"ended": 1.0}, {"launcher": "slurm"}, {"host": "elsewhere"}, {"pid_start": 1}]
)
def test_others_are_none(
    tmp_path: Path, process: "subprocess.Popen[bytes]", more: dict[str, Any]
) -> None:
    orphans.refuse(written(tmp_path, job_of(process.pid, **more)))


def test_the_study_called_again_is_refused_and_starts_nothing(
    tmp_path: Path,
    process: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    words = ["--study", "demo", "--site", "local", "--gpus", "1", "--strategies", "ddp", "fsdp"]
    assert cli.main([*words, "--dry-run"]) == 0
    (run_id,) = {
        word.rpartition("/")[2]
        for line in capsys.readouterr().out.splitlines()
        if "--strategy ddp" in line
        for word in line.split()
        if "/logs/demo/" in word
    }
    study = StudyPaths(tmp_path / "logs" / "demo")
    study.run(run_id).folder.mkdir(parents=True)
    write_json(study.run(run_id).job, job_of(process.pid))
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"kill {process.pid}")
    assert not study.plan.exists()
