"""Studies on Slurm: `python run_benchmarks.py` from a login node to the figures."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.spec.plan import Plan
from support.checkout import Checkout, make_checkout, records

SMALL = ["--study", "demo", "--epochs", "1", "--train-samples", "512", "--test-samples", "256"]
SMALL += ["--breakdown-iterations", "0"]
MODEL = """
import os
import time

import torch


def make():
    time.sleep(float(os.environ.get("WAIT_S", 0)))
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Checkout:
    """A checkout whose path has a space in it, and a model that can wait."""
    folder = tmp_path_factory.mktemp("studies")
    made = make_checkout(folder / "my kit", folder / "data")
    (made.folder / "mine.py").write_text(MODEL)
    return made


def bench(cluster, site: Checkout, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """`python run_benchmarks.py words`, from the checkout."""
    own = {**site.env, "PYTHONPATH": str(site.folder), **env}
    command = [sys.executable, "run_benchmarks.py", *words]
    return cluster.run(*command, cwd=site.folder, env=own, timeout=1200)


def jobkit(cluster, site: Checkout, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jobkit", *words]
    own = {**site.env, "PYTHONPATH": str(site.folder / "src")}
    return cluster.run(*command, cwd=site.folder, env=own, timeout=480)


def plan_of(site: Checkout, name: str) -> Plan:
    return Plan.read(site.folder / "logs" / name / "plan.json")


def statuses(cluster, site: Checkout, name: str) -> dict[str, str]:
    shown = json.loads(jobkit(cluster, site, "status", name, "--json").stdout)
    return {row["run_id"]: row["status"] for row in shown["runs"]}


def known(cluster) -> set[str]:
    """The jobs that Slurm has not forgotten."""
    return set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split())


def jobs_of(site: Checkout, name: str) -> set[str]:
    """The arrays of a study, by the records of its runs."""
    folder = site.folder / "logs" / name
    ids = [json.loads(path.read_text())["job_id"] for path in folder.glob("*/submission.json")]
    return {i.split("_")[0] for i in ids}


def test_a_study_from_submission_to_figures(cluster, site: Checkout) -> None:
    """DDP and FSDP at 1 rank and at 2 x 2; results come without the login."""
    words = [
        *SMALL,
        "--name",
        "whole",
        "--strategies",
        "ddp",
        "fsdp",
        "--gpus",
        "1",
        "2x2",
    ]
    done = bench(cluster, site, *words, "--no-wait", "--global-batch-size", "128")
    assert done.returncode == 0, done.stderr
    arrays, collector = re.search(r"Slurm jobs ([\d, ]+); job (\d+) then", done.stdout).groups()
    assert len(arrays.split(",")) == 2  # one sbatch a shape
    assert cluster.wait(collector, 960) == ("COMPLETED", "0:0")
    folder = site.folder / "logs" / "whole"
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert {row["nodes"] for row in rows} == {"1", "2"}
    assert (folder / "figures" / "time_per_epoch.png").stat().st_size > 10_000
    losses = [float(row["val_loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


def test_the_same_losses_as_on_this_machine(cluster, site: Checkout) -> None:
    """Follows the study above: the local launcher's run of the same spec."""
    words = [*SMALL, "--name", "here", "--site", "local", "--strategies", "ddp", "--gpus", "1"]
    assert bench(cluster, site, *words, "--global-batch-size", "128").returncode == 0
    (run_id,) = plan_of(site, "here").runs
    losses = [
        records(site.folder / "logs" / study / run_id / "metrics" / "0.jsonl", "epoch")[-1]
        for study in ("here", "whole")
    ]
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"], rel=1e-6)


def test_a_dry_run_is_byte_for_byte_what_is_submitted(cluster, site: Checkout) -> None:
    words = [*SMALL, "--name", "same", "--strategies", "ddp", "--gpus", "1", "2x1", "--time", "5"]
    words += ["--repeats", "2", "--comment", 'it\'s "one", $HOME']
    before = known(cluster)
    dry = bench(cluster, site, *words, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert known(cluster) <= before
    assert not (site.folder / "logs" / "same").exists()
    assert bench(cluster, site, *words, "--no-wait", "--no-collect").returncode == 0
    scripts = {p.read_text() for p in (site.folder / "logs" / "same").glob("*/job.sh")}
    assert len(scripts) == 2
    assert all(script in dry.stdout for script in scripts)
    jobkit(cluster, site, "cancel", "same")


def test_cancelled_told_and_only_the_rest_is_submitted_again(cluster, site: Checkout) -> None:
    model = ["--model", "mine:make", "--strategies", "ddp", "--gpus", "1", "--repeats", "3"]
    words = [*SMALL, "--name", "again", *model, "--no-collect"]
    started = bench(cluster, site, *words, "--max-running", "1", "--no-wait", WAIT_S="600")
    assert started.returncode == 0, started.stderr
    (job_id,) = jobs_of(site, "again")
    cluster.wait_for(f"{job_id}_0", JobState="RUNNING")
    found = statuses(cluster, site, "again")
    assert sorted(found.values()) == ["pending", "pending", "running"]
    assert "is under way" not in bench(cluster, site, *words, "--no-wait").stderr
    assert jobs_of(site, "again") == {job_id}, "a run under way was submitted once more"
    assert "its runs were ended" in jobkit(cluster, site, "cancel", "again").stdout
    assert set(statuses(cluster, site, "again").values()) == {"cancelled"}
    collected = cluster.run(
        sys.executable, "collect_results.py", "again", cwd=site.folder, env=site.env
    )
    assert collected.returncode == 3 and "cancelled" in collected.stdout
    only = bench(cluster, site, *words, "--only", "timeout", "--no-wait")
    assert "none to start" in only.stdout
    again = bench(cluster, site, *words)
    assert again.returncode == 0, again.stdout
    assert set(statuses(cluster, site, "again").values()) == {"ok"}


def test_a_job_killed_from_outside_is_not_lost(cluster, site: Checkout) -> None:
    words = [*SMALL, "--name", "lost", "--model", "mine:make", "--strategies", "ddp", "--gpus", "1"]
    bench(cluster, site, *words, "--no-wait", "--no-collect", WAIT_S="600")
    (job_id,) = jobs_of(site, "lost")
    cluster.wait_for(job_id, JobState="RUNNING")
    time.sleep(2)
    cluster.run("scancel", "--signal=KILL", "--full", job_id)
    cluster.wait(job_id)
    (status,) = statuses(cluster, site, "lost").values()
    assert status in ("failed", "cancelled")


def test_within_one_allocation_on_the_same_nodes(cluster, site: Checkout) -> None:
    words = [*SMALL, "--name", "within", "--strategies", "ddp", "--gpus", "1", "2x2"]
    done = bench(cluster, site, *words, "--within-allocation", "--no-collect")
    assert done.returncode == 0, done.stdout
    assert len(jobs_of(site, "within")) == 1
    folder = site.folder / "logs" / "within"
    starts = [records(path, "run_start")[0] for path in folder.glob("*/metrics/0.jsonl")]
    assert sorted(start["world_size"] for start in starts) == [1, 4]
    nodes = [
        set(start["node_list"].split(",")) for start in sorted(starts, key=lambda s: s["nodes"])
    ]
    assert nodes[0] < nodes[1]


REFUSED = [
    (["-p", "nix"], "known partitions: batch"),
    (["--gpus", "1x5"], "site 'minicluster' has 4"),
    (["--gpus", "9x4"], "sbatch rejected the job"),
    (["--time", "1:2:3:4"], "must be minutes, HH:MM:SS or D-HH:MM:SS"),
    (["--time", "soon"], "must be minutes"),
    (["-C", "nosuch"], "Invalid feature"),
    (["-w", "n99"], "Invalid node name"),
    (["--max-node-hours", "0.1"], "more than --max-node-hours"),
    (["--site", "minicluter"], "did you mean 'minicluster'"),
    (["--site", "broken.toml"], "did you mean 'partition'"),
    (["--sbatch", "--nosuch=1"], "unrecognized option"),
    (["--sbatch", "--nodes=3"], "jobkit sets this itself"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(w) for w, _ in REFUSED])
def test_refused_in_one_line_with_nothing_submitted(
    cluster, site: Checkout, words: list[str], said: str
) -> None:
    (site.folder / "broken.toml").write_text("partitoin = 'batch'\n")
    before = known(cluster)
    done = bench(cluster, site, *SMALL, "--name", "refused", "--no-wait", *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert known(cluster) <= before
    assert not (site.folder / "logs" / "refused").exists()


@pytest.fixture(scope="module")
def strict(make_cluster):
    """A cluster that knows its accounts, as those of most sites do."""
    return make_cluster("--enforce", "--nodes=1")


@pytest.mark.skipif(os.geteuid() != 0, reason="the accounting knows root, and no other user")
@pytest.mark.parametrize(
    ("words", "said"),
    [(["-A", "nix"], "known accounts: root"), (["-q", "nix"], "known QOS: normal")],
)
def test_an_unknown_account_or_qos_is_refused_with_the_known_ones(
    strict, site: Checkout, words: list[str], said: str
) -> None:
    done = bench(strict, site, *SMALL, "--name", "refused", "--no-wait", *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (site.folder / "logs" / "refused").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the accounting knows root, and no other user")
def test_a_study_above_the_limit_of_submitted_jobs_goes_on(strict, site: Checkout) -> None:
    limit = ["sacctmgr", "-i", "modify", "user", "root", "set"]
    words = ["--name", "limited", "--gpus", "1", "--repeats", "3", "--no-collect", "--no-auto"]
    # Long enough that none has ended as the third is refused.
    words += ["--gpu-request", "none", "--", "sleep", "20"]
    assert strict.run(*limit, "MaxSubmitJobs=2").returncode == 0
    try:
        part = bench(strict, site, "--no-wait", *words)
        assert part.returncode == 3, part.stderr
        assert "1 runs were not submitted" in part.stdout and "job submit limit" in part.stdout
        whole = bench(strict, site, *words)
        assert whole.returncode == 0, whole.stdout + whole.stderr
        assert "all 3 runs are ok" in whole.stdout
    finally:
        assert strict.run(*limit, "MaxSubmitJobs=-1").returncode == 0


def test_no_slurm_commands_with_a_site_of_slurm(site: Checkout, tmp_path: Path) -> None:
    path = {"PATH": f"{Path(sys.executable).parent}:{tmp_path}"}
    command = [sys.executable, "run_benchmarks.py", *SMALL, "--site", "slurm"]
    env = {**site.env, **path}
    done = subprocess.run(command, cwd=site.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no 'sbatch' on PATH" in done.stderr and done.stderr.count("\n") == 1


def test_a_controller_that_does_not_answer_is_one_line(cluster, site: Checkout, tmp_path) -> None:
    text = cluster.layout.slurm_conf.read_text()
    dead = tmp_path / "slurm.conf"
    dead.write_text(
        re.sub(r"(?m)^SlurmctldPort=.*", "SlurmctldPort=9", text) + "\nMessageTimeout=2\n"
    )
    done = bench(cluster, site, *SMALL, "--name", "dead", "--no-wait", SLURM_CONF=str(dead))
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1 and "Unable to contact slurm controller" in done.stderr


def test_a_hundred_runs_are_one_call(cluster, site: Checkout) -> None:
    words = ["--name", "many", "--strategies", "ddp", "--gpus", "1", "--repeats", "100"]
    done = bench(cluster, site, *SMALL, *words, "--no-wait", "--no-collect", "--sbatch=--hold")
    assert done.returncode == 0, done.stderr
    assert len(jobs_of(site, "many")) == 1
    assert list(statuses(cluster, site, "many").values()) == ["pending"] * 100
    jobkit(cluster, site, "cancel", "many")
