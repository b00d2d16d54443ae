"""Which record of a run counts, what a launcher's view of it is, and that of single jobs."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jobkit.launch import cancel, cli, launcher, status, view
from jobkit.launch.command import LaunchRequest
from jobkit.launch.states import States, progress, select
from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import BAD_ENDS, STATUSES, RunState, read_job
from jobkit.paths import RunPaths, StudyPaths, logs_root, write_json
from jobkit.processes import identify
from jobkit.program import lines
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study
from support.fake_study import FakeRun, make_plan, rate, whole_run


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    return make_plan("two", strategies=("ddp",), gpus=(1, 2))


def run_of(plan: Plan, index: int = 0) -> RunPaths:
    paths = plan.paths.run(list(plan.runs)[index])
    paths.folder.mkdir(exist_ok=True)
    return paths


def leave_outcome(plan: Plan, index: int, **outcome: str) -> None:
    path = run_of(plan, index).outcome(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"exit_code": int(outcome["status"] != "ok"), **outcome})


def test_a_submission_counts_until_its_job_has_started(plan: Plan) -> None:
    paths = run_of(plan)
    write_json(paths.job, {"job_id": "7", "started": 100.0, "exit_code": 1})
    write_json(paths.submission, {"job_id": "9", "submitted": 200.0, "shared": True})
    assert read_job(paths)["job_id"] == "9"
    write_json(paths.job, {"job_id": "9", "started": 150.0})  # a node whose clock is behind
    assert read_job(paths) == {"job_id": "9", "started": 150.0, "shared": True}
    write_json(paths.job, {"job_id": None, "started": 300.0})  # later, without Slurm
    assert read_job(paths)["started"] == 300.0


def test_which_runs_a_launch_starts() -> None:
    """Never what runs or waits: two would write one folder."""
    found = {status: RunState(status=status) for status in STATUSES}
    assert {*select(found)} == {"missing", *BAD_ENDS}


def test_a_cluster_that_did_not_answer_is_asked_again(plan, monkeypatch) -> None:
    """Until its name is known, a job's number may be another cluster's."""
    paths, run_id = run_of(plan), next(iter(plan.runs))
    write_json(paths.job, {"job_id": "17", "started": 100.0, "cluster": "alps", "host": "x"})
    names: list[str | None] = [None, "alps"]
    monkeypatch.setattr(slurm_jobs, "cluster", lambda: names.pop(0))
    said = {"17": slurm_jobs.Job(job_id="17", state="CANCELLED")}
    monkeypatch.setattr(slurm_jobs, "ask", lambda ids, _: {i: said[i] for i in ids})
    states = States(plan)
    assert states.look(fresh=True)[run_id].status != "cancelled"
    assert states.look(fresh=True)[run_id].status == "cancelled"
    assert names == []


def test_a_run_that_failed_is_looked_at_again_once_it_is_started_again(plan, monkeypatch) -> None:
    """Ended runs are read once; what was told before the start is of their last attempt."""
    ended = {"started": 100.0, "ended": 110.0, "pid": 1, "host": "x"}
    jobs = [run_of(plan, index).job for index in (0, 1)]
    for job in jobs:
        write_json(job, ended | {"exit_code": 1})
    prepared = launcher.prepare(plan, LaunchRequest(site="local"))
    assert {state.status for state in prepared.looks.of_runs.values()} == {"failed"}

    def start(*_: object) -> None:
        for index, job in enumerate(jobs):
            write_json(job, ended | {"exit_code": 0})
            leave_outcome(plan, index, status="ok")

    monkeypatch.setattr(launcher.local, "start", start)
    launcher.start(prepared)
    assert {state.status for state in prepared.states().values()} == {"ok"}


def test_a_reason_is_told_once_with_the_first_log(monkeypatch, capsys) -> None:
    none = SimpleNamespace(wait=lambda pause_s: time.sleep(pause_s) or [])
    monkeypatch.setattr(view, "Signals", lambda: none)  # those of the tests stay as they are
    words = ["--site", "local", "--gpus", "1", "--repeats", "5", "--no-auto", "--name", "bad"]
    assert cli.main([*words, "--", sys.executable, "-c", "raise SystemExit(1)"]) == 1
    said = capsys.readouterr().out
    assert len(list(StudyPaths.named("bad").folder.glob("*/job.json"))) == 5
    assert len(re.findall(r"^  \d+ runs failed: ", said, re.M)) == 1
    assert said.count("log: ") == 1 == said.count(" and 2 more; log: ")
    assert "plot_results" not in said


def test_of_many_runs_those_that_failed_are_listed(plan, monkeypatch, capsys) -> None:
    """With their reason as it is, brackets too, and once where it is that of the run above."""
    leave_outcome(plan, 1, status="failed", reason="rank 1: OSError: [/data/x] gone")
    monkeypatch.setattr(status, "MAX_SHOWN", 1)
    assert status.main(["two"]) == 0
    said = " ".join(capsys.readouterr().out.replace("\n", "").split())
    assert "1 missing, 1 failed" in said and "1 of 2 runs are not listed here" in said
    first, second = plan.runs
    assert second in said and "[/data/x]" in said and first not in said
    leave_outcome(plan, 0, status="failed", reason="rank 1: OSError: [/data/x] gone")
    monkeypatch.setattr(status, "MAX_SHOWN", 9)
    assert status.main(["two"]) == 0
    said = capsys.readouterr().out
    assert said.count("OSError") == 1 == said.count("\n    as above\n")  # of 80 columns


def test_a_pipe_gets_whole_lines_and_a_note_where_slurm_does_not_answer(plan, capsys) -> None:
    write_json(run_of(plan).job, {"job_id": "17", "started": 100.0, "exit_code": 1})
    leave_outcome(plan, 0, status="failed", reason=f"rank 1: OSError: {'x' * 99} gone")
    assert status.main(["two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = plan.runs
    assert [lines[2].split()[:2], lines[4].split()[:2]] == [[first, "failed"], [second, "missing"]]
    assert lines[3] == f"    rank 1: OSError: {'x' * 99} gone"
    assert lines[-1].startswith("note: Slurm did not answer (squeue: No such file or directory)")


def test_a_pipe_gets_the_table_once_all_runs_have_ended(monkeypatch, capsys) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin().train(0).flush()
    job = {"launcher": "local", "first_attempt": 0, **identify(os.getpid()), "started": time.time()}
    write_json(run.paths.job, job)

    def pause(_: float) -> None:
        assert capsys.readouterr().out == ""
        run.train(1, 2).end()
        write_json(run.paths.job, job | {"ended": time.time(), "exit_code": 0})

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause))
    assert status.main(["s", "--watch"]) == 0
    assert capsys.readouterr().out.startswith("s: 1 run: 1 ok")


def test_a_running_run_that_writes_nothing_may_hang(capsys) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin().train(0).flush()
    write_json(run.paths.job, {**identify(os.getpid()), "started": time.time(), "first_attempt": 0})
    said = []
    for ago in (500, 700):
        for path in (run.paths.log, run.paths.metrics(0)):
            path.touch()
            os.utime(path, (then := time.time() - ago, then))
        assert status.main(["s"]) == 0
        said.append(capsys.readouterr().out)
    assert "hang" not in said[0] and "no output or record for 11 min 4" in said[1]
    run.paths.log.touch()  # one of the two is enough
    assert status.main(["s"]) == 0 and "hang" not in capsys.readouterr().out


def test_the_time_of_a_run_that_noted_no_end_is_slurms_or_records(plan, monkeypatch) -> None:
    paths, spec = run_of(plan), next(iter(plan.runs.values()))
    write_json(paths.job, {"job_id": "17", "started": 100.0})
    run = FakeRun(paths.folder.parent, paths.folder.name, spec)
    with monkeypatch.context() as patch:
        patch.setattr(lines.time, "time", lambda: 160.0)
        run.writer.write("message", level="info", text="x")
    dead = RunState(status="timeout", attempt=0)
    for elapsed, took_s in (("1-00:01:05", 86465), ("1:05", 65), ("00:00:00", 0), ("", 60)):
        job = slurm_jobs.Job(job_id="17", state="TIMEOUT", elapsed=elapsed)
        assert progress(paths, spec, dead, job).elapsed_s == took_s
    write_json(paths.job, {"job_id": "17", "started": 100.0, "shared": True})
    assert progress(paths, spec, dead, replace(job, elapsed="1:05")).elapsed_s == 60
    assert progress(paths, spec, replace(dead, status="running"), job).elapsed_s > 1e9


def test_the_live_rate_is_that_of_the_table(monkeypatch, capsys) -> None:
    """The first epoch and the warm-up are in no rate; without epochs there is no such column."""
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    plan = make_plan("s", strategies=("ddp",), gpus=(2,))
    (run_id,) = plan.runs
    odd = {"val_loss": 0.7, "timed_images": 9, "epoch_time_s": -1.0}  # as somebody else may write
    whole_run(plan, run_id).writer.write("epoch", epoch=2, **odd)
    assert status.main(["s"]) == 0
    heading, row = [" ".join(x.split()) for x in capsys.readouterr().out.splitlines()[1:]]
    assert heading == "run status epoch loss images/s"
    assert f" ok 3/3 0.700 {rate(plan.runs[run_id]):,.0f} " in f"{row} "
    plan = Study.of_command(("true",), name="own", gpus=(2,), work={"unit": "tokens"}).expand()
    plan.save()
    run = FakeRun(plan.paths.folder, *plan.runs, *plan.runs.values())
    for n, wall_s in enumerate((3.0, 0.5, 1.5)):
        window = {"steps": 5, "work": 80, "step": 5 * n + 5, "wall_s": wall_s, "warmup": n == 0}
        run.writer.write("window", **window)
    write_json(run.paths.job, {**identify(os.getpid()), "started": time.time(), "first_attempt": 0})
    assert status.main(["own"]) == 0
    heading, row = [" ".join(x.split()) for x in capsys.readouterr().out.splitlines()[1:]]
    assert heading == "run status step tokens/s time"
    assert " running 15 160 " in f"{row} "  # 160 tokens of each of 2 ranks in 2 s
    leave_outcome(plan, 0, status="ok")
    assert status.main(["own"]) == 0  # steps that were profiled at its end are in no window
    assert " ok 160 " in " ".join(capsys.readouterr().out.split())


def test_status_lists_single_jobs_and_cancel_ends_none(monkeypatch, capsys) -> None:
    """In a folder of runs without a plan."""
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm to ask
    spec = RunSpec(epochs=3, dataset="synthetic", train_samples=8192)
    FakeRun(logs_root() / "single", "done", spec).begin().train(0, 1, 2).end()
    paths = RunPaths(logs_root() / "single" / "waits")
    paths.folder.mkdir()
    words = {"command": ["python", "train.py"]}
    write_json(paths.spec, {"v": 1, "study": "single", "run_id": "waits", "spec": words})
    write_json(paths.submission, {"job_id": "17", "submitted": 100.0, "shared": False})
    paths = RunPaths(logs_root() / "single" / "early")  # ended before it left its settings
    paths.folder.mkdir()
    write_json(paths.job, {"ended": 100.0, "exit_code": 2})
    assert status.main(["single", "--json"]) == 0
    runs = {r["run_id"]: r for r in json.loads(capsys.readouterr().out)["runs"]}
    assert {r: row["status"] == "ok" for r, row in runs.items()} == {
        "done": True, "early": False, "waits": False
    }  # fmt: skip
    assert runs["early"]["reason"] == "ended with exit code 2"
    assert cancel.main(["single"]) == 2
    assert "end one with scancel JOBID" in capsys.readouterr().err


def test_logs_that_exist_already_are_no_runs(capsys) -> None:
    """A list of logs is newer than the study, and neither to be watched nor to be ended."""
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    os.utime(plan.paths.plan, (1.0, 1.0))
    StudyPaths.named("from-logs").folder.mkdir(parents=True)
    write_json(StudyPaths.named("from-logs").given_logs, {"v": 1, "logs": []})
    assert status.main([]) == 0
    assert plan.paths.folder.name in capsys.readouterr().out
    assert cancel.main([plan.paths.folder.name]) == 0
    with pytest.raises(SystemExit):  # the newest study may be another one than is meant
        cancel.main([])
    capsys.readouterr()
    for command in (status, cancel):
        assert command.main(["from-logs"]) == 2
        assert "from-logs has no plan.json" in capsys.readouterr().err
