"""status --watch where there is no terminal: each change as it comes, in whole lines."""

import os
import socket
import time
from types import SimpleNamespace

import pytest

from jobkit.launch.follow import status
from jobkit.outcome.liveness import process_start
from jobkit.paths import read_json, write_json
from support.fake_study import FakeRun, make_plan


def test_a_pipe_gets_the_table_whenever_a_run_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin().train(0).flush()
    pid = os.getpid()
    job = {"v": 1, "launcher": "local", "job_id": None, "pid": pid, "first_attempt": 0}
    job |= {"pid_start": process_start(pid), "host": socket.gethostname(), "ended": None}
    write_json(run.paths.job, job | {"started": time.time(), "exit_code": None})
    said: list[str] = []

    def pause(_: float) -> None:
        """One epoch more at the second look, and its end at the third."""
        said.append(capsys.readouterr().out)
        if len(said) == 2:
            run.train(1).flush()
        if len(said) == 3:
            run.train(2).end()
            ended = {"ended": time.time(), "exit_code": 0}
            write_json(run.paths.job, {**(read_json(run.paths.job) or {}), **ended})

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause))
    assert status.main(["s", "--watch"]) == 0
    first, unchanged, second, last = *said, capsys.readouterr().out
    assert first.startswith("s: 1 run: 1 running") and " 1/3 " in first and first.endswith("\n")
    assert unchanged == ""
    assert " 2/3 " in second
    assert last.startswith("s: 1 run: 1 ok") and last.endswith("\n")
