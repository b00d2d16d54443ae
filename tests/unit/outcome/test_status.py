"""What became of a run, from real files and real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.outcome import state as states
from jobkit.outcome.state import Facts, judge, run_state
from jobkit.paths import RunPaths, write_json
from jobkit.processes import is_alive, pid_namespace, process_start
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun
from support.place import until

SPEC = RunSpec(dataset="synthetic", epochs=3)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "s", "r", SPEC)


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def job_of(process: subprocess.Popen[bytes], **more: object) -> dict[str, object]:
    job = {"v": 1, "launcher": "local", "job_id": None, "pid": process.pid, "first_attempt": 0}
    job |= {"pid_start": process_start(process.pid), "host": socket.gethostname()}
    return job | {"started": time.time(), "ended": None, "exit_code": None} | more


def ended(status: str, reason: str = "", exit_code: int | None = None) -> dict[str, object]:
    return {"status": status, "reason": reason, "exit_code": exit_code, "file": "r/outcome.json"}


def old(paths: RunPaths) -> None:
    """Let the run's files look as if nobody had written them for an hour."""
    for file in paths.folder.rglob("*"):
        os.utime(file, (time.time() - 3600,) * 2)


def test_the_evidence_is_a_line_of_its_file(run: FakeRun) -> None:
    lines = ("Traceback (most recent call last):", "  File 'x'", "MemoryError: x", "later words")
    run.begin().train(0).print("\n".join(lines))
    run.flush()
    write_json(run.paths.job, {"pid": 1, "ended": 9.0, "exit_code": 1})
    state = run_state(run.paths)
    assert (state.status, state.evidence) == ("oom", lines[2])
    assert state.evidence_file == "r/train.log"


def test_the_exit_code_speaks_where_nothing_else_does() -> None:
    tails = {"train.log": ["the last words"]}
    for code, status, word in (
        *((0, "failed", "without an outcome file"), (1, "failed", "code 1")),
        *((137, "failed", "SIGKILL"), (-9, "failed", "SIGKILL"), (255, "failed", "255")),
        *((143, "cancelled", "SIGTERM"), (130, "cancelled", "SIGINT")),
        (75, "preempted", "checkpoint"),
    ):
        state = judge(Facts(run_id="r", attempt=0, job={"exit_code": code}, tails=tails))
        assert (state.status, state.exit_code) == (status, code)
        assert (state.evidence, word in state.reason) == ("the last words", True)


def test_a_live_process_is_running_and_a_killed_one_failed(run, sleeper) -> None:
    run.begin().train(0).flush()
    write_json(run.paths.job, job_of(sleeper))
    assert run_state(run.paths).status == "running"
    # The one who watches it may be gone, and what it has started go on.
    child = {"pid": sleeper.pid, "pid_start": process_start(sleeper.pid)}
    write_json(run.paths.job, job_of(sleeper, pid=(1 << 22) - 1, pid_start=1, child=child))
    assert run_state(run.paths).status == "running"
    sleeper.send_signal(signal.SIGKILL)
    until(lambda: not process_start(sleeper.pid))  # a zombie counts as gone: nobody waited for it
    assert sleeper.returncode is None
    state = run_state(run.paths)
    assert (state.status, state.evidence) == ("failed", "epoch 1: fine")
    assert "exited without an outcome file" in state.reason


def test_a_pid_that_was_given_out_again_is_another_process(sleeper) -> None:
    sleeper.send_signal(signal.SIGSTOP)  # a stopped process is alive
    start = process_start(sleeper.pid)
    assert start is not None and is_alive(job_of(sleeper)) is True
    assert is_alive(job_of(sleeper, pid_start=start - 1)) is False
    assert is_alive(job_of(sleeper, host="elsewhere")) is None
    assert is_alive(job_of(sleeper, pid_ns=pid_namespace())) is True
    # A container may have the host's name: its processes have other numbers here, or none.
    assert is_alive(job_of(sleeper, pid_ns="pid:[1]")) is None
    assert is_alive(None) is False
    assert is_alive({"launcher": "slurm", "pid": None}) is None


def test_where_nobody_tells_of_its_end_new_files_are_of_a_run_at_work(run, sleeper) -> None:
    run.begin().train(0).flush()
    job = {"launcher": "run.sh", "job_id": None, "pid": 1, "host": "elsewhere"}
    in_container = job_of(sleeper, pid_ns="pid:[1]")  # which may have been restarted
    for record in (in_container, job):
        write_json(run.paths.job, record)
        run.paths.log.touch()
        state = run_state(run.paths)
        assert state.status == "running" and state.reason.startswith("its files changed")
        old(run.paths)
        assert run_state(run.paths).status == "failed"
    write_json(run.paths.job, {**job, "job_id": "17", "cluster": "alps"})
    old(run.paths)
    state = run_state(run.paths)
    assert state.status == "running"
    assert state.reason == "Slurm job 17 of cluster alps has not recorded an end"


def test_the_newest_attempt_decides(run: FakeRun, sleeper: subprocess.Popen[bytes]) -> None:
    run.begin().train(0).end("failed", "rank 1: ValueError: first", 1)
    state = run_state(run.paths)
    assert (state.status, state.exit_code, state.attempts) == ("failed", 1, 1)
    assert state.reason == "rank 1: ValueError: first"
    assert state.evidence_file == "r/attempts/0/outcome.json"
    write_json(run.paths.job, job_of(sleeper, first_attempt=1))
    assert run_state(run.paths).status == "running"  # started again, nothing left behind yet
    second = FakeRun(run.paths.folder.parent, "r", SPEC, attempt=1).begin()
    assert run_state(run.paths).status == "running"
    second.train(0, 1, 2).end()
    state = run_state(run.paths)
    assert (state.status, state.attempt, state.attempts) == ("ok", 1, 2)
    second.paths.outcome(1).unlink()  # it is ok by its own word only
    assert run_state(run.paths).status != "ok"


def test_a_run_goes_on_while_it_is_read(run, sleeper, monkeypatch) -> None:
    """It ends as its process is asked after; then its next start comes during the first look."""
    run.begin().train(0).flush()
    write_json(run.paths.job, job_of(sleeper))
    with monkeypatch.context() as patch:
        patch.setattr(states, "is_at_work", lambda _: not run.end("failed", "rank 0: x", 1))
        assert run_state(run.paths).reason == "rank 0: x"
    write_json(run.paths.job, job_of(sleeper, ended=9.0, exit_code=1))
    first_look = states._read_once

    def look(*words) -> Facts:
        facts = first_look(*words)
        write_json(run.paths.job, job_of(sleeper, first_attempt=1))
        return facts

    monkeypatch.setattr(states, "_read_once", look)
    assert run_state(run.paths).status == "running"


def test_who_stopped_a_run_that_saved_and_ended_is_slurms_to_say() -> None:
    own = "SIGTERM after iteration 4"
    end = ended("preempted", own, 75)
    requeued = " DUE TO JOB REQUEUE", "preempted"
    for why, status in (" DUE TO TIME LIMIT", "timeout"), ("", "cancelled"), requeued:
        line = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00{why} ***"
        state = judge(Facts(run_id="r", attempt=0, ending=end, tails={"log": [line]}))
        shown = own if status == "preempted" else line
        assert (state.status, state.evidence) == (status, shown)


def test_the_verdict_follows_from_the_facts_alone() -> None:
    for facts, status in [
        ({}, "missing"),
        ({"ending": ended("ok"), "attempt": 0}, "ok"),
        ({"ending": ended("ok"), "job": {"exit_code": 1}}, "ok"),
        ({"ending": ended("failed"), "attempt": 0}, "failed"),
        ({"ending": ended("failed"), "job": {"pid": 1}, "alive": True}, "running"),
        ({"ending": ended("preempted"), "job": {"exit_code": 75}}, "preempted"),
        ({"ending": ended("preempted"), "job": {"exit_code": 143}}, "cancelled"),
        ({"ending": ended("failed", exit_code=143)}, "cancelled"),
        ({"ending": ended("failed", exit_code=137)}, "failed"),
        ({"job": {"pid": 1}}, "failed"),
        ({"job": {"job_id": "7"}, "alive": None}, "pending"),
        ({"job": {"job_id": "7"}, "alive": None, "attempt": 0}, "running"),
        ({"job": {"host": "x"}, "alive": None, "attempt": 0, "age_s": 3.0}, "running"),
        ({"job": {"host": "x"}, "alive": None, "attempt": 0, "age_s": 300.0}, "failed"),
        ({"attempt": 0, "age_s": 3.0}, "running"),
        ({"attempt": 0, "age_s": -3.0}, "running"),
        ({"attempt": 0, "age_s": 300.0}, "failed"),
        ({"attempt": 0, "age_s": -2e9}, "failed"),  # a clock that jumped
        ({"logged": True}, "failed"),
    ]:
        assert judge(Facts(run_id="r", **facts)).status == status


def test_what_no_attempt_wrote_to(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "s" / "r")
    assert run_state(paths).status == "missing"
    unseen = judge(Facts(run_id="r", closed="Permission denied"))
    assert unseen.reason == "its folder cannot be read: Permission denied"
    assert judge(Facts(run_id="r"), ordered=True).status == "pending"
    (paths.attempts / "0").mkdir(parents=True)  # the attempt is only claimed
    assert run_state(paths).status == "running"
    old(paths)
    assert run_state(paths).status == "failed"
