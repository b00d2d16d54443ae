"""`cancel` in a study whose files somebody else wrote: it ends what is the study's alone."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from jobkit.launch.cancel import main
from jobkit.paths import write_json
from jobkit.processes import process_start
from jobkit.spec.study import Plan
from support.fake_study import make_plan
from support.place import script, until

SLURM = """#!/bin/sh
echo "${{0##*/}} $*" >>{calls}
case "${{0##*/}}" in
squeue) case "$*" in *%F*) echo "{shown}" ;; *) echo "17|RUNNING|0:10|n1|None" ;; esac ;;
esac
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make_plan("theirs", strategies=("ddp",), gpus=(1,))


@pytest.mark.parametrize(
    "whose", ["this", "another", "nobody knows", pytest.param("a stranger's", marks=as_root)]
)
def test_a_launcher_is_ended_in_its_own_study_only(plan, whose, tmp_path, capsys) -> None:
    """Another study's or user's launcher is left alone, and one of which no start is known."""
    folder = tmp_path / "other" if whose == "another" else plan.paths.folder
    words = ["-m", "jobkit.launch.local", str(folder)]
    user = 65534 if whose == "a stranger's" else None
    process = subprocess.Popen(["bash", "-c", "read", *words], stdin=subprocess.PIPE, user=user)
    until(lambda: b"launch.local" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    try:
        begun = None if whose == "nobody knows" else process_start(process.pid)
        record = {"pid": process.pid, "pid_start": begun, "host": socket.gethostname()}
        write_json(plan.paths.launcher, record)
        assert main(["theirs"]) == (0 if whose == "this" else 2)
        assert capsys.readouterr().err.count("\n") == (whose != "this")
        if whose == "this":
            assert process.wait(100) == -15
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("job_id", "shown", "ended"),  # shown: the job, whose it is, and its name, as Slurm says it
    [
        ("17", "17|{uid}|theirs", True),
        ("17", "17|{uid}|mine", False),
        ("17", "17|{other}|theirs", False),
        ("17", "", False),
        *((word, "17|{uid}|theirs", False) for word in ("--state=RUNNING", "17 18", "17\n")),
    ],
)
def test_own_jobs_alone_are_ended(plan, tmp_path, monkeypatch, job_id, shown, ended) -> None:
    calls, place = tmp_path / "calls", tmp_path / "bin"
    place.mkdir()
    calls.touch()
    said = shown.format(uid=os.geteuid(), other=os.geteuid() + 1)
    for name in ("squeue", "sacct", "scancel"):
        script(place / name, SLURM.format(calls=calls, shown=said))
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    monkeypatch.setattr("jobkit.launch.cancel.wait_for_end", lambda plan: True)
    paths = plan.paths.run(next(iter(plan.runs)))
    paths.folder.mkdir()
    write_json(paths.job, {"launcher": "slurm", "job_id": job_id, "host": "n1", "started": 1.0})
    assert main(["theirs"]) == 0 or not ended
    assert ("scancel 17" in calls.read_text()) == ended
    assert ended or "scancel" not in calls.read_text()


def test_a_study_in_the_folder_of_another_is_left_alone(plan, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert main(["theirs"]) == 2
    assert "belongs to" in capsys.readouterr().err
