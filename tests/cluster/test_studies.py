"""Studies on Slurm: from a login node to the figures, and what Slurm refuses."""

import os
import re
import sys

import pytest

from jobkit.paths import RunPaths, read_json
from support.checkout import TINY, Checkout
from support.place import until
from support.records import records_of, rows_of

SMALL = ["--study", "demo", "--epochs", "1", "--train-samples", "512", "--test-samples", "256"]
SMALL += ["--why", "0", "--strategies", "ddp", "--global-batch-size", "64"]
SMALL += ["--threads", "1"]


def known(cluster) -> set[str]:
    return set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split())


def jobs_of(kit: Checkout, name: str) -> set[str]:
    ids = [str(read_json(paths.submission)["job_id"]) for paths in kit.runs(name)]
    return {job_id.split("_")[0] for job_id in ids}


@pytest.fixture(scope="module", autouse=True)
def trainings(cluster, kit: Checkout) -> dict[str, str]:
    """All trainings, while the other tests run: the ids of their jobs."""
    script = kit.sbatch(cluster, "hpc/train_distributed.sh", *TINY)
    (whole,) = kit.start(cluster, "whole", *SMALL, "--gpus", "2x2")
    held = [*SMALL, "--gpus", "1", "--epochs", "3", "--checkpoint-every", "4"]
    held += ["--timeout-s", "900"]  # it is held until its test comes
    (requeued,) = kit.start(cluster, "requeued", *held, JOBKIT_FAULT="hold@9:0")
    return {"script": script, "whole": whole, "requeued": requeued}


@pytest.mark.parametrize(
    ("script", "nodes"), [("train_distributed_multinode.sh", 4), ("train_distributed_gpu.sh", 1)]
)
def test_the_other_ready_scripts_start_four_ranks(cluster, kit, script, nodes) -> None:
    """The ranks are stand-ins, a shell each: what they are given counts."""
    tell = "echo I am $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $NODE_RANK"
    text = (kit.folder / "hpc" / script).read_text().replace(" --device cpu", "")
    (kit.folder / f"told-{script}").write_text(text)
    job_id = kit.sbatch(cluster, f"told-{script}", "--", "sh", "-c", tell)
    assert cluster.wait(job_id) == ("COMPLETED", "0:0"), kit.log(job_id)
    own = 4 // nodes
    told = [line for line in kit.log(job_id).split("\n") if line.startswith("I am")]
    assert sorted(told) == [f"I am {r} of 4, {r % own} of {own} on {r // own}" for r in range(4)]


@pytest.mark.parametrize(
    "gpus", [["--export=NONE", "--gres=gpu:2"], ["--gpus-per-task=1", "--gpus-per-node=2"]]
)
def test_each_rank_sees_all_gpus_that_its_job_has_on_the_node(cluster, kit, gpus) -> None:
    words = [*gpus, "--ntasks-per-node=2", "--exclusive", "run.sh", "--why", "0"]
    job_id = kit.sbatch(cluster, *words, "--", "sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES")
    assert cluster.wait(job_id) == ("COMPLETED", "0:0"), kit.log(job_id)
    assert re.findall(r"^sees .*", kit.log(job_id), re.MULTILINE) == ["sees 0,1"] * 2


@pytest.mark.long
def test_ranks_of_two_jobs_do_not_train_together(cluster, kit: Checkout) -> None:
    """The same master and port, but of jobs with other restart counts."""
    differ = 'export SLURM_RESTART_COUNT=$SLURM_PROCID; exec python -m jobkit.payload.main "$@"'
    env = kit.env | {"MASTER_PORT": "12345", "PYTHONPATH": str(kit.folder / "src")}
    command = ["srun", "--ntasks=2", "bash", "-c", differ, "x", *TINY]
    done = cluster.run(*command, cwd=kit.folder, env=env)
    assert done.returncode != 0 and "belongs to another job or run" in done.stderr


# --- the launcher ---


def test_cancelled_told_and_only_the_rest_is_submitted_again(cluster, kit: Checkout) -> None:
    text = "import os, time; time.sleep(float(os.environ.get('WAIT_S', 0)))"
    words = ["--gpus", "1", "--repeats", "2", "--max-running", "1", "--no-auto"]
    words += ["--comment", 'it\'s "one", $HOME']
    command = ["--", sys.executable, "-c", text]
    (job_id,) = kit.start(cluster, "rest", *words, *command, WAIT_S="600")
    cluster.running(f"{job_id}_0")
    assert sorted(kit.statuses(cluster, "rest").values()) == ["pending", "running"]
    kit.bench(cluster, "--name", "rest", "--no-wait", *words, *command)
    assert jobs_of(kit, "rest") == {job_id}, "a run under way was submitted once more"
    ended = kit.python(cluster, "-m", "jobkit", "cancel", "rest")
    assert "its runs were ended" in ended.stdout
    assert set(kit.statuses(cluster, "rest").values()) == {"cancelled"}
    collected = kit.python(cluster, "collect_results.py", "rest")
    assert collected.returncode == 3 and "cancelled" in collected.stdout
    again = kit.bench(cluster, "--name", "rest", *words, *command)
    assert again.returncode == 0, again.stdout
    assert set(kit.statuses(cluster, "rest").values()) == {"ok"}


REFUSED = [  # the last two as root, as the accounting knows no other user
    (["-p", "nix"], "known partitions: batch"),
    (["--gpus", "9x4"], "sbatch rejected the job"),
    (["--sbatch", "--nosuch=1"], "unrecognized option"),
    (["-A", "nix"], "known accounts: root"),
    (["-q", "nix"], "known QOS: normal"),
]


def test_what_slurm_refuses_is_one_line_and_not_submitted(cluster, kit, tmp_path) -> None:
    text = (cluster.root / "slurm.conf").read_text()
    text = re.sub(r"(?m)^SlurmctldPort=.*", "SlurmctldPort=9\nMessageTimeout=2", text)
    (tmp_path / "slurm.conf").write_text(text)
    before, away = known(cluster), {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    rows = [(words, said, {}) for words, said in REFUSED[: None if os.geteuid() == 0 else -2]]
    for words, said, env in (*rows, ([], "Unable to contact slurm controller", away)):
        done = kit.bench(cluster, *SMALL, "--name", "refused", "--no-wait", *words, **env)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not (kit.folder / "logs" / "refused").exists()
    assert known(cluster) <= before


def test_a_training_that_is_requeued_resumes_from_its_checkpoint(cluster, kit, trainings) -> None:
    """USR2 to all processes of the job, the batch shell's as well, with the CONT of Slurm."""
    (paths,) = kit.runs("requeued")
    until(paths.fault_marker(0).exists, "iteration 9")
    for name in ("USR2", "CONT"):
        cluster.run("scancel", f"--signal={name}", "--full", *jobs_of(kit, "requeued"))
    assert cluster.wait(trainings["requeued"]) == ("COMPLETED", "0:0"), paths.log.read_text()
    assert "SIGUSR2" in read_json(paths.outcome(0))["reason"]
    (loaded,) = records_of(paths.metrics(1), "checkpoint")[:1]
    assert loaded["action"] == "loaded" and 9 <= loaded["iteration"] <= 12
    assert kit.python(cluster, "collect_results.py", "requeued").returncode == 0
    folder = paths.folder.parent
    assert [(r["status"], r["attempts"]) for r in rows_of(folder / "results.csv")] == [("ok", "2")]
    assert [row["epoch"] for row in rows_of(folder / "epochs.csv")] == ["0", "1", "2"]


def test_a_study_from_submission_to_figures(cluster, kit, trainings) -> None:
    """On 2 x 2 ranks."""
    assert cluster.wait(trainings["whole"]) == ("COMPLETED", "0:0")
    plotted = cluster.run("./plot_results.sh", "logs/whole", cwd=kit.folder, env=kit.env)
    assert plotted.returncode == 0, plotted.stderr
    folder = kit.folder / "logs" / "whole"
    (row,) = rows_of(folder / "results.csv")
    assert (row["status"], row["nodes"], row["world_size"]) == ("ok", "2", "4")
    assert float(row["val_loss"]) > 0 and float(row["throughput"]) > 0
    assert list((folder / "figures").glob("*.png")) and (folder / "report.html").exists()


def test_a_ready_script_trains(cluster, kit: Checkout, trainings: dict[str, str]) -> None:
    job_id = trainings["script"]
    assert cluster.wait(job_id) == ("COMPLETED", "0:0"), kit.log(job_id)
    paths = RunPaths(kit.folder / "logs" / "single" / f"job-{job_id}")
    (start,) = records_of(paths.metrics(0), "run_start")[:1]
    assert (start["nodes"], start["world_size"], start["job_id"]) == (2, 2, job_id)
    assert "backend gloo, 2 processes on 2 nodes" in kit.log(job_id)
