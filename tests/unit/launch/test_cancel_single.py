"""`cancel` of one job of run.sh alone: only the job or process that run.sh noted in its folder."""

import os
import socket
import subprocess
import time
from typing import Any

import pytest

from jobkit.launch import slurm_cluster
from jobkit.launch.cancel import main
from jobkit.outcome import slurm_jobs
from jobkit.paths import logs_root, write_json
from jobkit.processes import process_start


def job(**noted: object) -> None:
    """Make a run's folder, in which run.sh noted who runs its newest start."""
    folder = logs_root() / "single" / "run-1"
    folder.mkdir(parents=True)
    write_json(folder / "spec.json", {"v": 1, "spec": {"command": ["true"]}})
    if noted:
        known = {"v": 1, "launcher": "run.sh", "job_id": None, "host": socket.gethostname()}
        write_json(folder / "job.json", known | {"cluster": "here"} | noted)


@pytest.mark.parametrize(
    ("noted", "ended"),
    [
        ({"job_id": "15_1"}, "15_1"),  # not the others of its array
        ({"job_id": "15_1", "shared": True}, "which may do other work too"),
        ({"job_id": "17", "cluster": "elsewhere"}, "not known to be of this one"),
        ({"job_id": "17", "cluster": None}, "not known to be of this one"),
        ({"job_id": "18"}, "of user id"),
        ({"job_id": "19"}, "no such job"),
        ({"job_id": "20"}, "squeue failed, nothing was cancelled: Unable to contact"),
        ({"job_id": "-u x"}, "is no id of a Slurm job"),
        ({}, "does not say whose it is"),
        ({"launcher": "slurm", "job_id": "17"}, "does not say whose it is"),
    ],
)
def test_only_the_job_that_run_sh_noted_is_ended(monkeypatch, capsys, noted, ended) -> None:
    """18 is another user's, Slurm does not know 19, and does not answer for 20."""
    called: list[list[str]] = []

    def call(words: list[str]) -> Any:
        called.append(words)
        uid = os.geteuid() + ("18" in words)
        failed = {"19": "Invalid job id specified", "20": "Unable to contact controller"}
        error = "".join(text for number, text in failed.items() if number in words)
        shown = "" if error else f"15|{uid}|train\n"
        return subprocess.CompletedProcess(words, bool(error), shown, error)

    monkeypatch.setattr(slurm_cluster, "call", call)
    monkeypatch.setattr(slurm_jobs, "cluster", lambda: "here")
    job(**noted)
    code, shown = main(["run-1"]), capsys.readouterr()
    scancels = {words[-1] for words in called if words[0] == "scancel"}
    if " " in ended:
        assert ended in shown.out + shown.err and not scancels
        assert code == (0 if "no such job" in ended else 2)
    else:
        assert code == 0 and scancels == {ended}
        assert f"job {ended}: Slurm was asked" in shown.out


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
