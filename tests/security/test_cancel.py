"""`cancel` in a study whose files somebody else wrote: it ends what is the study's alone."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.launch.cancel import main
from jobkit.launch.slurm import commands
from jobkit.outcome.liveness import process_start
from jobkit.paths import write_json
from jobkit.spec.plan import Plan
from support.fake_study import make_plan

SLURM = """#!/bin/sh
echo "${{0##*/}} $*" >>{calls}
case "${{0##*/}}" in
squeue) case "$*" in *%F*) echo "{shown}" ;; *) echo "17|RUNNING|0:10|n1|None" ;; esac ;;
esac
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A saved study of one run; there is no Slurm."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make_plan("theirs", strategies=("ddp",), gpus=(1,))


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of ours that has nothing to do with any study."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, shown: str) -> Path:
    """Put stand-ins for Slurm's commands on PATH; return the file that has their calls."""
    calls, place = folder / "calls", folder / "bin"
    place.mkdir()
    for name in ("squeue", "sacct", "scancel"):
        script = place / name
        script.write_text(SLURM.format(calls=calls, shown=shown))
        script.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return calls


def record_of(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What launcher.json would say of a process, were it the launcher."""
    start = process_start(process.pid)
    return {"pid": process.pid, "pid_start": start, "host": socket.gethostname()}


@pytest.mark.parametrize("without", [(), ("pid_start",), ("host",), ("pid_start", "host")])
def test_a_process_is_signalled_only_as_the_studys_launcher(
    plan: Plan, bystander: "subprocess.Popen[bytes]", without: tuple[str, ...], capsys: Any
) -> None:
    record = {k: v for k, v in record_of(bystander).items() if k not in without}
    write_json(plan.paths.launcher, record)
    assert main(["theirs"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.3)


def launcher_of(folder: Path) -> "subprocess.Popen[bytes]":
    """A process whose command line is that of a study's launcher."""
    words = ["-m", "jobkit.launch.local.driver", str(folder)]
    program = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program, *words])
    deadline = time.monotonic() + 100
    while b"driver" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
    return process


@pytest.mark.parametrize("whose", ["this", "another"])
def test_a_launcher_is_ended_in_its_own_study_only(plan: Plan, whose: str, tmp_path: Path) -> None:
    """Another study's launcher is left alone, though it is a launcher and ours."""
    process = launcher_of(plan.paths.folder if whose == "this" else tmp_path / "other")
    try:
        write_json(plan.paths.launcher, record_of(process))
        assert main(["theirs"]) == (0 if whose == "this" else 2)
        if whose == "this":
            assert process.wait(100) == -15
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_the_launcher_of_a_launch_is_one(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that a real launch starts are those that cancel looks for."""
    from jobkit.launch.command import Order
    from jobkit.launch.local import start

    seen: list[list[str]] = []

    def popen(words: list[str], **_: Any) -> None:
        seen.append(words)
        raise OSError("not started")

    monkeypatch.setattr(start.subprocess, "Popen", popen)
    monkeypatch.chdir(plan.paths.folder.parent)
    with pytest.raises(OSError, match="not started"):
        start.start(plan.paths, Order(folder="theirs", run_ids=[]))
    (words,) = seen
    assert start.is_launcher([word.encode() for word in words], plan.paths)


HOSTILE = [
    "--state=RUNNING",
    "--user=root",
    "17 18",
    "-u",
    "17_x",
    "17_[0-9]",
    "",
    "\u0661",
    "17\n",
]


@pytest.mark.parametrize("job_id", HOSTILE)
def test_no_word_of_a_file_becomes_an_option_of_scancel(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: str
) -> None:
    calls = slurm(tmp_path, monkeypatch, f"17|{os.geteuid()}|theirs")
    paths = plan.paths.run(next(iter(plan.runs)))
    paths.folder.mkdir()
    write_json(paths.job, {"launcher": "slurm", "job_id": job_id, "host": "n1", "started": 1.0})
    write_json(plan.paths.collect_job, {"job_id": job_id})
    main(["theirs"])
    assert "scancel" not in calls.read_text()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job_id=st.text() | st.from_regex(r"-{0,2}[0-9a-z_=]{0,8}"))
def test_scancel_gets_numbers_only(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(commands, "call", lambda words: called.extend(words))
    try:
        commands.cancel([job_id])
    except UsageError:
        assert called == []
    else:
        rest = [w for w in called if w not in ("scancel", "--state=PENDING")]
        assert rest and all(w.replace("_", "", 1).isdecimal() and w.isascii() for w in rest)


@pytest.mark.parametrize(
    ("uid", "name", "ended"),
    [(0, "theirs", True), (0, "theirs-collect", True), (0, "mine", False), (1, "theirs", False)],
)
def test_only_jobs_of_ones_own_and_of_the_study_are_ended(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, name: str, ended: bool
) -> None:
    """uid: beside one's own."""
    calls = slurm(tmp_path, monkeypatch, f"17|{os.geteuid() + uid}|{name}")
    monkeypatch.setattr("jobkit.launch.slurm.jobs.wait_for_end", lambda plan: True)
    paths = plan.paths.run(next(iter(plan.runs)))
    paths.folder.mkdir()
    write_json(paths.job, {"launcher": "slurm", "job_id": "17", "host": "n1", "started": 1.0})
    assert main(["theirs"]) == (0 if ended else 2)
    assert ("scancel 17" in calls.read_text()) == ended


def test_a_study_in_the_folder_of_another_is_left_alone(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert main(["theirs"]) == 2
    assert "belongs to" in capsys.readouterr().err


def test_a_job_that_slurm_does_not_show_is_left_alone(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = slurm(tmp_path, monkeypatch, "")
    monkeypatch.setattr("jobkit.launch.slurm.jobs.wait_for_end", lambda plan: True)
    paths = plan.paths.run(next(iter(plan.runs)))
    paths.folder.mkdir()
    write_json(paths.job, {"launcher": "slurm", "job_id": "17", "host": "n1", "started": 1.0})
    main(["theirs"])
    assert "scancel" not in calls.read_text()
