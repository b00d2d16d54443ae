"""`cancel` of one job of run.sh alone: only the job or process that run.sh noted in its folder."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch import slurm_cluster as commands
from jobkit.launch.cancel import main
from jobkit.paths import logs_root, write_json
from jobkit.processes import process_start

AT = "2026-01-02T03:04:0"
SAYS = AT + "5|train|/home/x|y"


def job(says: str = SAYS, **noted: object) -> Path:
    """A run's folder, in which run.sh noted who runs its newest start."""
    folder = logs_root() / "single" / "run-1"
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "first").write_text(f"17 0\n{says}\n")
    write_json(folder / "spec.json", {"v": 1, "spec": {"command": ["true"]}})
    if noted:
        known = {"v": 1, "launcher": "run.sh", "job_id": None, "host": socket.gethostname()}
        write_json(folder / "job.json", known | noted)
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


NOT_THAT = "is not known to be that of"


@pytest.mark.parametrize(
    ("noted", "says", "ended"),
    [
        ({"job_id": "17"}, SAYS, "15_1"),  # not the others of its array
        ({"job_id": "15_1", "shared": False}, SAYS, "15_1"),
        ({"job_id": "20"}, AT + "4|train|/home/x|y", "20"),  # requeued since
        # The same number, and another job: of another cluster.
        ({"job_id": "17"}, AT + "4|train|/home/x|y", NOT_THAT),
        ({"job_id": "20"}, AT + "6|train|/home/x|y", NOT_THAT),
        ({"job_id": "20"}, AT + "4|other|/home/x|y", NOT_THAT),
        ({"job_id": "20"}, AT + "4|train|/home/x", NOT_THAT),
        ({"job_id": "20"}, "", NOT_THAT),
        ({"job_id": "18"}, SAYS, "is of user id"),
        ({"job_id": "19"}, SAYS, "no such job"),
        ({"job_id": "15_1", "shared": True}, SAYS, "which may do other work too"),
        ({}, SAYS, "does not say whose it is"),
        ({"launcher": "slurm", "job_id": "17"}, SAYS, "does not say whose it is"),
    ],
)
def test_only_the_job_that_run_sh_noted_is_ended(slurm, capsys, noted, says, ended) -> None:
    job(says, **noted)
    code, shown = main(["run-1"]), capsys.readouterr()
    scancels = {words[-1] for words in slurm if words[0] == "scancel"}
    if " " in ended:
        assert ended in shown.out + shown.err and not scancels
        assert code == (0 if "no such job" in ended else 2)
    else:
        assert code == 0 and scancels == {ended}
        assert f"job {ended}: Slurm was asked" in shown.out


@pytest.mark.parametrize(
    ("stderr", "code"),
    [("slurm_load_jobs error: Invalid job id specified", 0), ("Unable to contact controller", 2)],
)
def test_a_silent_slurm_is_no_job_that_has_ended(monkeypatch, capsys, stderr, code) -> None:
    failed = subprocess.CompletedProcess(["squeue"], 1, "", f"{stderr}\n")
    monkeypatch.setattr(commands, "call", lambda *_, **__: failed)
    job(job_id="17")
    assert main(["run-1"]) == code
    assert ("no such job" in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(
    ("script", "later", "noted", "said"),
    [
        ("run.sh", 0, "itself", "it was ended"),
        ("run.sh", 1, "itself", "it is not running"),  # another has its number since
        ("other.sh", 0, "itself", "it is not running"),
        ("run.sh", 0, "child", "end them with: kill "),  # run.sh was killed, its ranks not
        ("run.sh", 0, "elsewhere", "started on elsewhere"),
    ],
)
def test_only_the_noted_process_is_ended(tmp_path, capsys, script, later, noted, said) -> None:
    text = "trap 'exit 143' TERM\ntouch up\nwhile :; do sleep 0.05; done\n"
    (tmp_path / script).write_text(text)
    with subprocess.Popen(["bash", str(tmp_path / script)], cwd=tmp_path) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        start = process_start(process.pid)
        assert start is not None
        it = {"pid": process.pid, "pid_start": start + later}
        gone = {"pid": (1 << 22) - 1, "pid_start": 5, "child": it}
        job(**{"itself": it, "child": gone, "elsewhere": it | {"host": "elsewhere"}}[noted])
        assert main(["run-1"]) == (0 if noted == "itself" else 2)
        shown = capsys.readouterr()
        assert said in shown.out + shown.err
        if said == "it was ended":
            assert process.wait(200) == 143
        assert (process.poll() is None) == (said != "it was ended")
        process.kill()
