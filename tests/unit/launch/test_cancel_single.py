"""`cancel` of one job of run.sh alone: only the job or process that run.sh noted in its folder."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch import cancel_single as own
from jobkit.launch.cancel import main
from jobkit.launch.slurm import commands
from jobkit.paths import logs_root, write_json
from jobkit.processes import process_start

SAYS = "2026-01-02T03:04:05|train|/home/x|y"
HERE = {"job_id": None, "host": socket.gethostname()}


def job(name: str, says: str = SAYS, **noted: object) -> Path:
    """A run's folder, in which run.sh noted who runs its newest start."""
    folder = logs_root() / "single" / name
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "first").write_text(f"17 0\n{says}\n")
    write_json(folder / "spec.json", {"v": 1, "spec": {"command": ["true"]}})
    if noted:
        write_json(folder / "job.json", {"v": 1, "launcher": "run.sh", **noted})
    return folder


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Slurm's commands as called; job 17 is the last element of array 15, and 18 another's."""
    called: list[list[str]] = []
    jobs = (("16", "15_0", 0), ("17", "15_1", 0), ("18", "18", 1), ("20", "20", 0))
    queue = "".join(f"{i}|{name}|{os.geteuid() + more}|{SAYS}\n" for i, name, more in jobs)

    def call(words: list[str], **_: str) -> Any:
        called.append(words)
        shown = queue if "squeue" in words else ""
        if words[0] == "scontrol":
            shown = f"JobId=1 Requeue=1 Restarts={int(words[-1] == '20')} BatchFlag=1\n"
        return subprocess.CompletedProcess(words, 0, shown, "")

    monkeypatch.setattr(commands, "call", call)
    return called


@pytest.mark.parametrize(
    ("noted", "says", "ended"),
    [
        ({"job_id": "17"}, SAYS, "15_1"),  # not the others of its array
        ({"job_id": "15_1", "shared": False}, SAYS, "15_1"),
        ({"job_id": "20"}, "2026-01-02T03:04:04|train|/home/x|y", "20"),  # requeued since
        # The same number, and another job: of another cluster.
        ({"job_id": "17"}, "2026-01-02T03:04:04|train|/home/x|y", "is not known to be that of"),
        ({"job_id": "20"}, "2026-01-02T03:04:06|train|/home/x|y", "is not known to be that of"),
        ({"job_id": "20"}, "2026-01-02T03:04:04|other|/home/x|y", "is not known to be that of"),
        ({"job_id": "20"}, "2026-01-02T03:04:04|train|/home/x", "is not known to be that of"),
        ({"job_id": "20"}, "", "is not known to be that of"),
        ({"job_id": "18"}, SAYS, "is of user id"),
        ({"job_id": "19"}, SAYS, "no such job"),
        ({"job_id": "15_1", "shared": True}, SAYS, "which may do other work too"),
        ({}, SAYS, "does not say whose it is"),
        ({"launcher": "slurm", "job_id": "17"}, SAYS, "does not say whose it is"),
    ],
)
def test_only_the_job_that_run_sh_noted_is_ended(
    slurm: list[list[str]], capsys: pytest.CaptureFixture[str], noted: Any, says: str, ended: str
) -> None:
    asked = main([job("job-5", says, **noted).name]), capsys.readouterr()
    scancels = [words[-1] for words in slurm if words[0] == "scancel"]
    if " " in ended:
        assert ended in asked[1].out + asked[1].err and scancels == []
        assert asked[0] == (0 if "no such job" in ended else 2)
    else:
        assert asked[0] == 0 and set(scancels) == {ended}
        assert f"job {ended}: Slurm was asked" in asked[1].out


@pytest.mark.parametrize(
    ("stderr", "code"),
    [("slurm_load_jobs error: Invalid job id specified", 0), ("Unable to contact controller", 2)],
)
def test_a_silent_slurm_is_not_taken_for_a_job_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: str, code: int
) -> None:
    failed = subprocess.CompletedProcess(["squeue"], 1, "", f"{stderr}\n")
    monkeypatch.setattr(commands, "call", lambda *_, **__: failed)
    assert main([job("job-17", job_id="17").name]) == code
    assert ("no such job" in capsys.readouterr().out) == (code == 0)


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A run.sh, so to say."""
    script = tmp_path / "run.sh"
    script.write_text("trap 'exit 143' TERM\ntouch up\nwhile :; do sleep 0.05; done\n")
    made = subprocess.Popen(["bash", str(script)], cwd=tmp_path)
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    yield made
    made.kill()
    made.wait()


@pytest.mark.parametrize("later", [0, 1])
def test_a_run_of_this_machine_is_ended_by_its_folder_s_name(
    process: "subprocess.Popen[bytes]", later: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that has the number of its process since."""
    start = process_start(process.pid)
    assert start is not None
    job("run-1", **HERE, pid=process.pid, pid_start=start + later)
    assert main(["run-1"]) == 0
    said = capsys.readouterr().out
    if later:
        assert process.poll() is None and "it is not running" in said
    else:
        assert process.wait(200) == 143 and "it was ended" in said


def test_a_process_that_is_no_run_sh_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        job("run-1", **HERE, pid=other.pid, pid_start=process_start(other.pid))
        assert main(["run-1"]) == 0
        assert "it is not running" in capsys.readouterr().out
        assert other.poll() is None
        other.kill()


def test_the_ranks_of_a_run_sh_that_was_killed_are_named(
    process: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    child = {"pid": process.pid, "pid_start": process_start(process.pid)}
    job("run-1", **HERE, child=child, pid=(1 << 22) - 1, pid_start=5)
    assert main(["run-1"]) == 2
    assert f"end them with: kill {process.pid}" in capsys.readouterr().err
    assert process.poll() is None


def test_a_run_that_another_host_resumed_is_left_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    job("run-1", job_id=None, pid=os.getpid(), pid_start=1, host="elsewhere")
    assert main(["run-1"]) == 2
    assert "started on elsewhere" in capsys.readouterr().err


def test_of_another_user_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job("job-17", job_id="17")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="belongs to user id"):
        own.cancel_single(folder)
