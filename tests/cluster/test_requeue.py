"""Jobs that are stopped early and go on: single ones, studies, and all of it in one allocation."""

import csv
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.outcome import slurm_jobs
from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths, read_json
from support.checkout import TINY, Checkout, make_checkout, records

LONG = [*TINY, "--epochs", "400", "--checkpoint-every", "epoch"]
STUDY = ["--study", "demo", "--train-samples", "512", "--test-samples", "256"]
STUDY += ["--strategies", "ddp", "--gpus", "2", "--global-batch-size", "64", "--threads", "1"]
STUDY += ["--epochs", "3", "--checkpoint-every", "4", "--breakdown-iterations", "0"]
STRUCK = "usr2@9:0"  # the first attempt, in its second epoch
HELD = "hold@9:1"


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Checkout:
    folder = tmp_path_factory.mktemp("requeue")
    return make_checkout(folder / "my kit", folder / "data")


def until(condition: Callable[[], object], timeout: float = 720) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def bench(cluster, kit: Checkout, *words: str, **env: str):
    """`python run_benchmarks.py words`, from the checkout."""
    own = {**kit.env, "PYTHONPATH": str(kit.folder), **env}
    done = cluster.run(sys.executable, "run_benchmarks.py", *words, cwd=kit.folder, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def jobs(cluster, kit: Checkout) -> dict[str, str]:
    """All jobs of these tests at once: most of their time is waiting for Slurm."""
    one = ["--ntasks-per-node=1", "--gpus-per-node=1"]
    pipe = kit.sbatch(cluster, *one, "run.sh", "--max-restarts", "1", *LONG)
    last = kit.sbatch(
        cluster, *one, "run.sh", *TINY, "--checkpoint-every", "2", JOBKIT_FAULT="usr2@4:0"
    )
    again = ["--name", "again", "--repeats", "2", "--no-wait"]
    study = bench(cluster, kit, *STUDY, *again, JOBKIT_FAULT=HELD)
    whole = ["--name", "within", "--gpus", "1", "--repeats", "2"]  # in place of STUDY's 2
    one_job = ["--within-allocation", "--no-wait"]
    within = bench(cluster, kit, *STUDY, *whole, *one_job, JOBKIT_FAULT=STRUCK)
    found = re.compile(r"Slurm jobs? (\d+); job (\d+) then")
    (array, collects), (part, after) = (found.search(d.stdout).groups() for d in (study, within))
    return {
        "signalled": pipe, "last": last, "array": array, "collects": collects,
        "part": part, "after": after,
    }  # fmt: skip


def test_signals_to_the_whole_job_are_heard_and_requeueing_is_bounded(
    cluster, kit: Checkout, jobs
) -> None:
    """USR2 to the batch shell and the steps with CONT beside it, as Slurm sends them."""
    job_id = jobs["signalled"]
    paths = RunPaths(kit.folder / "logs" / "single" / f"job-{job_id}")
    for attempt in (0, 1):
        metrics = paths.metrics(attempt)
        until(lambda: metrics.exists() and records(metrics, "startup"))  # noqa: B023
        for name in ("USR2", "CONT"):
            cluster.run("scancel", f"--signal={name}", "--full", job_id)
        outcome = paths.outcome(attempt)
        until(outcome.exists)
        assert "SIGUSR2" in read_json(outcome)["reason"]
    assert cluster.wait(job_id, 1200) == ("FAILED", "75:0"), kit.log(job_id)
    assert "requeued 1 times already (--max-restarts): not again" in kit.log(job_id)
    assert paths.attempt_numbers() == [0, 1]
    state = slurm_jobs.merged(run_state(paths), slurm_jobs.Job(job_id=job_id, state="FAILED"))
    assert state.status == "preempted" and "checkpoint saved" in state.evidence


def test_a_warning_to_a_whole_study_is_heard(cluster, kit: Checkout, jobs) -> None:
    """USR2 to all processes of both elements of the array: the launcher's own as well."""
    folder = kit.folder / "logs" / "again"
    until(lambda: len(list(folder.glob("*/attempts/0/fault_marker"))) == 2)
    cluster.run("scancel", "--signal=USR2", "--full", jobs["array"])
    until(lambda: len(list(folder.glob("*/attempts/0/outcome.json"))) == 2)


def test_a_run_that_has_just_finished_is_not_requeued(cluster, kit: Checkout, jobs) -> None:
    """The signal comes after its last iteration."""
    assert cluster.wait(jobs["last"], 1200) == ("COMPLETED", "0:0"), kit.log(jobs["last"])
    last = RunPaths(kit.folder / "logs" / "single" / f"job-{jobs['last']}")
    assert last.attempt_numbers() == [0]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("name", "job"), [("again", "collects"), ("within", "after")])
def test_a_study_that_is_requeued_goes_on_and_is_collected_whole(
    cluster, kit: Checkout, jobs, name: str, job: str
) -> None:
    assert cluster.wait(jobs[job], 1200) == ("COMPLETED", "0:0")
    folder = kit.folder / "logs" / name
    found = rows(folder / "results.csv")
    assert [(row["status"], row["attempts"]) for row in found] == [("ok", "2")] * 2
    epochs = [(row["run_id"], row["epoch"]) for row in rows(folder / "epochs.csv")]
    assert sorted(epochs) == sorted((row["run_id"], str(e)) for row in found for e in range(3))
    for row in found:
        log = (folder / row["run_id"] / "train.log").read_text()
        assert [f"start: attempt {n} of" in log for n in (0, 1, 2)] == [True, True, False]
        assert "resuming from" in log and "iteration 1" in log
        (loaded,) = records(folder / row["run_id"] / "metrics" / "1.jsonl", "checkpoint")[:1]
        assert loaded["action"] == "loaded" and 9 <= loaded["iteration"] <= 12


def test_a_job_over_its_memory_is_oom_with_the_line_that_says_so(
    make_cluster, kit: Checkout
) -> None:
    small = make_cluster("--memory-limits", "--nodes=1")
    own = {**kit.env, "PYTHONPATH": str(kit.folder)}
    words = [*STUDY, "--name", "memory", "--mem", "150M", "--no-collect"]
    done = small.run(
        sys.executable, "run_benchmarks.py", *words, cwd=kit.folder, env=own, timeout=480
    )
    assert done.returncode == 1 and ": oom:" in done.stdout, done.stdout + done.stderr
    done = small.run(sys.executable, "collect_results.py", "memory", cwd=kit.folder, env=own)
    assert done.returncode == 3
    (row,) = rows(kit.folder / "logs" / "memory" / "results.csv")
    assert row["status"] == "oom" and "exceeded memory limit" in row["evidence"], row
    assert small.door("down").returncode == 0
