"""One job: `sbatch run.sh`, as a user of a cluster types it."""

import shutil
from pathlib import Path

import pytest

from jobkit.paths import read_json
from support.checkout import TINY, Checkout, make_checkout

# A model of the user's own that says what reached it, and may wait instead of training.
MODEL = """
import os
import time

import torch


def make():
    print("HOSTILE=" + ascii(os.environ.get("HOSTILE")), flush=True)
    time.sleep(float(os.environ.get("WAIT_S", 0)))
    if os.environ.get("FAIL_ON_RANK") == os.environ["SLURM_PROCID"]:
        raise RuntimeError("planted fault")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
"""
HOSTILE = "a,b 'single' \"double\" $HOME `date` \\ \n second line"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    """A checkout whose path has a space and a quote in it."""
    folder = tmp_path_factory.mktemp("jobs")
    made = make_checkout(folder / "my job's kit", folder / "data")
    (made.folder / "mine.py").write_text(MODEL)
    return made


@pytest.fixture(scope="module")
def own(checkout: Checkout) -> dict[str, str]:
    """The environment with which jobs find the user's own model."""
    return {"PYTHONPATH": str(checkout.folder)}


@pytest.fixture(scope="module", autouse=True)
def too_long(cluster, checkout: Checkout, own) -> str:
    """A job that runs into its time limit of a minute, while the other tests run."""
    model = ["--ntasks-per-node=1", "run.sh", "--model", "mine:make", *TINY]
    small = ["--nodelist=n4", "--gpus-per-node=1", "--time=1"]  # room for the others
    return checkout.sbatch(cluster, *small, *model, **own, WAIT_S="300")


def test_defaults_and_what_overrides_them(cluster, checkout: Checkout, too_long: str) -> None:
    """Four ranks on a node, and one rank: the same losses, and the newest log."""
    one = checkout.sbatch(cluster, "--ntasks-per-node=1", "run.sh", *TINY)
    four = checkout.sbatch(cluster, "run.sh", "--strategy", "fsdp", *TINY)
    jobs = {one: (1, 1), four: (1, 4)}
    losses = []
    for job_id, (nodes, world_size) in jobs.items():
        assert cluster.wait(job_id, 480) == ("COMPLETED", "0:0"), checkout.log(job_id)
        (start,) = checkout.records(job_id, "run_start")[:1]
        assert (start["nodes"], start["world_size"]) == (nodes, world_size)
        assert start["job_id"] == job_id
        assert len(start["node_list"].split(",")) == nodes
        losses += [checkout.records(job_id, "epoch")[-1]["val_loss"]]
    assert losses[1:] == pytest.approx([losses[0]], rel=1e-4)
    link = checkout.folder / "train.log"
    assert link.is_symlink() and link.resolve().name in {
        f"train-{j}.log" for j in (*jobs, too_long)
    }


def test_two_jobs_on_one_node_both_train(cluster, checkout: Checkout) -> None:
    words = ["--nodelist=n1", "--ntasks-per-node=2", "--gpus-per-node=2", "run.sh", *TINY]
    jobs = [checkout.sbatch(cluster, *words) for _ in range(2)]
    for job_id in jobs:
        assert cluster.wait(job_id, 480) == ("COMPLETED", "0:0"), checkout.log(job_id)
    masters = {
        line.split("master ")[1]
        for j in jobs
        for line in checkout.log(j).split("\n")
        if "mast" in line
    }
    assert len(masters) == 2


def test_a_rank_that_fails_fails_the_job(cluster, checkout: Checkout, own) -> None:
    words = ["--ntasks-per-node=2", "run.sh", "--model", "mine:make", *TINY]
    job_id = checkout.sbatch(cluster, *words, **own, FAIL_ON_RANK="1")
    state, code = cluster.wait(job_id, 480)
    assert state == "FAILED" and code == "1:0", (state, code)
    assert "[rank1] RuntimeError: planted fault" in checkout.log(job_id)
    left = checkout.folder / "logs/single" / f"job-{job_id}" / "attempts/0/outcome.json"
    assert read_json(left)["reason"] == "rank 1: RuntimeError: planted fault"


def test_bad_input_ends_with_2_and_one_line(cluster, checkout: Checkout) -> None:
    job_id = checkout.sbatch(cluster, "--ntasks-per-node=2", "run.sh", "--strategy", "fsdpp")
    assert cluster.wait(job_id, 300) == ("FAILED", "2:0")
    said = [line for line in checkout.log(job_id).split("\n") if "error" in line.lower()]
    ours = [line for line in said if not line.startswith(("srun:", "slurmstepd:"))]
    assert len(ours) == 1 and "did you mean 'fsdp'" in ours[0], said


def test_hostile_arguments_and_environment_arrive_whole(
    cluster, checkout: Checkout, own, tmp_path: Path
) -> None:
    data = tmp_path / "da ta, 'one' \"two\" $HOME `x`;&"
    words = ["run.sh", "--model", "mine:make", "--data-dir", str(data), *TINY]
    job_id = checkout.sbatch(cluster, "--ntasks-per-node=1", *words, **own, HOSTILE=HOSTILE)
    assert cluster.wait(job_id, 300) == ("COMPLETED", "0:0"), checkout.log(job_id)
    assert f"HOSTILE={HOSTILE!a}" in checkout.log(job_id)
    assert any(data.iterdir())


@pytest.mark.parametrize(("script", "nodes"), [("train.sh", 1), ("train_distributed.sh", 2)])
def test_the_ready_scripts_train(cluster, checkout: Checkout, script: str, nodes: int) -> None:
    job_id = checkout.sbatch(cluster, f"hpc/{script}", *TINY)
    assert cluster.wait(job_id, 480) == ("COMPLETED", "0:0"), checkout.log(job_id)
    (start,) = checkout.records(job_id, "run_start")[:1]
    assert (start["nodes"], start["world_size"]) == (nodes, nodes)
    ranks = "2 processes on 2 nodes" if nodes == 2 else "1 process on 1 node"
    assert f"backend gloo, {ranks}" in checkout.log(job_id)


@pytest.mark.parametrize(
    ("script", "nodes"), [("train_distributed_multinode.sh", 4), ("train_distributed_gpu.sh", 1)]
)
def test_the_ready_scripts_start_four_ranks(
    cluster, checkout: Checkout, script: str, nodes: int
) -> None:
    """The ranks are stand-ins, a shell each: what they are given counts."""
    tell = "echo I am $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $NODE_RANK"
    text = (checkout.folder / "hpc" / script).read_text().replace(" --device cpu", "")
    (checkout.folder / f"told-{script}").write_text(text)
    job_id = checkout.sbatch(cluster, f"told-{script}", "--", "sh", "-c", tell)
    assert cluster.wait(job_id, 480) == ("COMPLETED", "0:0"), checkout.log(job_id)
    own = 4 // nodes
    told = [line for line in checkout.log(job_id).split("\n") if line.startswith("I am")]
    assert sorted(told) == [
        f"I am {r} of 4, {r % own} of {own} on {r // own}" for r in range(4)
    ]  # fmt: skip


def test_ranks_of_another_job_are_not_trained_with(cluster, checkout: Checkout) -> None:
    """The same master and port, another restart count: the ranks compare, and refuse."""
    differ = 'export SLURM_RESTART_COUNT=$SLURM_PROCID; exec python -m jobkit.payload.main "$@"'
    command = ["srun", "--ntasks=2", "bash", "-c", differ, "x", *TINY]
    env = checkout.env | {"MASTER_PORT": "12345", "PYTHONPATH": str(checkout.folder / "src")}
    done = cluster.run(*command, cwd=checkout.folder, env=env, timeout=480)
    assert done.returncode != 0
    assert "belongs to another job or run" in done.stderr


def test_uneven_tasks_are_refused_with_the_fix(cluster, checkout: Checkout) -> None:
    command = ["srun", "--nodes=2", "--ntasks=3", "python", "-m", "jobkit.payload.main", *TINY]
    env = checkout.env | {"PYTHONPATH": str(checkout.folder / "src")}
    done = cluster.run(*command, cwd=checkout.folder, env=env, timeout=300)
    assert done.returncode != 0
    assert "give --nodes and --ntasks-per-node, and not --ntasks" in done.stderr


def test_a_checkout_without_source_is_one_line(cluster, checkout: Checkout, tmp_path: Path) -> None:
    shutil.copy2(checkout.folder / "run.sh", tmp_path / "run.sh")
    (tmp_path / "logs").mkdir()
    # Nor is jobkit installed for the Python there, which would say where it is.
    job_id = Checkout(tmp_path, tmp_path).sbatch(cluster, "run.sh", JOBKIT_PYTHON="/usr/bin/false")
    assert cluster.wait(job_id, 300) == ("FAILED", "2:0")
    assert "submit from jobkit's folder" in (tmp_path / f"logs/train-{job_id}.err").read_text()


def test_a_job_over_its_time_limit_is_a_timeout(cluster, checkout: Checkout, too_long) -> None:
    state, _ = cluster.wait(too_long, 600)
    assert state == "TIMEOUT"
    assert "DUE TO TIME LIMIT" in checkout.log(too_long)
