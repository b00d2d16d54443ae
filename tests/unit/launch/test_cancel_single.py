"""`cancel` of one job of run.sh alone: the job or process that its folder is named after."""

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


def job(name: str, noted: str = SAYS) -> Path:
    folder = logs_root() / "single" / name
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "first").write_text(f"17 0\n{noted}\n")
    write_json(folder / "spec.json", {"v": 1, "spec": {"command": ["true"]}})
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


def test_a_job_is_ended_and_not_the_others_of_its_array(
    slurm: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    job("job-17")
    assert main(["job-17"]) == 0
    assert [words for words in slurm if words[0] == "scancel"][-1] == ["scancel", "15_1"]
    assert "job 15_1: Slurm was asked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "noted", "ended"),
    [
        ("job-17", "2026-01-02T03:04:04|train|/home/x|y", False),  # not requeued
        ("job-20", "2026-01-02T03:04:04|train|/home/x|y", True),
        ("job-20", "2026-01-02T03:04:06|train|/home/x|y", False),  # never submitted earlier
        ("job-20", "2026-01-02T03:04:04|other|/home/x|y", False),
        ("job-20", "2026-01-02T03:04:04|train|/home/x", False),
        ("job-20", "", False),  # a run.sh that noted nothing
    ],
)
def test_a_job_of_the_same_number_of_another_cluster_is_left_alone(
    slurm: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    name: str,
    noted: str,
    ended: bool,
) -> None:
    job(name, noted)
    assert main([name]) == (0 if ended else 2)
    assert bool([words for words in slurm if words[0] == "scancel"]) == ended
    assert capsys.readouterr().err.count("scancel") == (not ended)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("job-18", 2, "is of user id"),
        ("job-19", 0, "no such job"),
        ("mine", 2, "--run-dir named"),
        ("run-20261399-999999-1", 2, "--run-dir named"),
        ("run-20260102-030405-0", 2, "cannot be signalled safely"),
    ],
)
def test_no_other_job_is_ended(
    slurm: list[list[str]], capsys: pytest.CaptureFixture[str], name: str, code: int, said: str
) -> None:
    assert main([str(job(name))]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert not [words for words in slurm if words[0] == "scancel"]


@pytest.mark.parametrize(
    ("stderr", "code"),
    [("slurm_load_jobs error: Invalid job id specified", 0), ("Unable to contact controller", 2)],
)
def test_a_silent_slurm_is_not_taken_for_a_job_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: str, code: int
) -> None:
    failed = subprocess.CompletedProcess(["squeue"], 1, "", f"{stderr}\n")
    monkeypatch.setattr(commands, "call", lambda *_, **__: failed)
    assert main([job("job-17").name]) == code
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


def named(pid: int, since_s: float) -> str:
    return time.strftime("run-%Y%m%d-%H%M%S-", time.localtime(time.time() + since_s)) + str(pid)


def test_a_run_of_this_machine_is_ended(
    process: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([job(named(process.pid, 0)).name]) == 0
    assert process.wait(200) == 143
    assert "it was ended" in capsys.readouterr().out


@pytest.mark.parametrize("since_s", [-3600, 10 * 86_400])
def test_a_process_of_another_time_than_the_run_is_left_alone(
    process: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str], since_s: float
) -> None:
    """One that came later has the number anew; a name of the future is nobody's."""
    assert main([job(named(process.pid, since_s)).name]) == 0
    assert "it is not running" in capsys.readouterr().out
    assert process.poll() is None


def test_a_process_that_is_no_run_sh_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        assert main([job(named(other.pid, 1)).name]) == 0
        assert "it is not running" in capsys.readouterr().out
        assert other.poll() is None
        other.kill()


def newest(name: str, **noted: object) -> Path:
    """A run's folder, in which run.sh noted who runs its newest start."""
    folder = job(name)
    write_json(folder / "job.json", {"v": 1, "launcher": "run.sh", **noted})
    return folder


@pytest.mark.parametrize("later", [0, 1])
def test_a_resumed_run_of_this_machine_is_ended_by_its_folder_s_name(
    process: "subprocess.Popen[bytes]", later: int
) -> None:
    """Not one that has the number of its process since."""
    start = process_start(process.pid)
    assert start is not None
    newest(
        "run-20260102-030405-1", job_id=None, pid=process.pid, pid_start=start + later,
        host=socket.gethostname(),
    )  # fmt: skip
    assert main(["run-20260102-030405-1"]) == 0
    assert (process.poll() is None) == bool(later)


def test_the_ranks_of_a_run_sh_that_was_killed_are_named(
    process: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    child = {"pid": process.pid, "pid_start": process_start(process.pid)}
    gone = {"pid": (1 << 22) - 1, "pid_start": 5, "host": socket.gethostname()}
    newest("run-20260102-030405-1", job_id=None, child=child, **gone)
    assert main(["run-20260102-030405-1"]) == 2
    assert f"end them with: kill {process.pid}" in capsys.readouterr().err
    assert process.poll() is None


def test_a_run_that_another_host_resumed_is_left_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    newest("run-20260102-030405-1", job_id=None, pid=os.getpid(), pid_start=1, host="elsewhere")
    assert main(["run-20260102-030405-1"]) == 2
    assert "started on elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [False, True])
def test_the_job_that_resumed_a_run_is_ended_unless_it_does_other_work(
    slurm: list[list[str]], capsys: pytest.CaptureFixture[str], shared: bool
) -> None:
    newest("job-5", job_id="15_1", shared=shared, pid=1)
    assert main(["job-5"]) == (2 if shared else 0)
    ended = [words for words in slurm if words[0] == "scancel"]
    assert ended[-1:] == ([] if shared else [["scancel", "15_1"]])
    assert ("scancel 15_1" in capsys.readouterr().err) == shared


def test_of_another_user_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job("job-17")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="belongs to user id"):
        own.cancel_single(folder)
