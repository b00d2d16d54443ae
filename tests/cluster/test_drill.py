"""A drill of every fault on a real Slurm; what it says of each, and the daemons that it kills."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.drill.faults import FAULTS, WIDE
from jobkit.launch.slurm.minicluster import Minicluster
from support.checkout import Checkout, make_checkout
from support.training_programs import STEPS

ROOT_ONLY = {name for name, fault in FAULTS.items() if fault.needs in ("links", "root")}
LOST = {"kill": 5, "raise": 5, "hang": 5, "node": 5, "link": 5, "slurmd": 5}
LOST |= {"disk-full": 15, "cut-short": 15, "bit-flip": 15}  # the checkpoint before the newest


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Checkout:
    folder = tmp_path_factory.mktemp("drill")
    return make_checkout(folder / "kit", folder / "data")


@pytest.fixture(scope="module")
def hard(make_cluster):
    """A cluster on which all that a drill knows can go wrong."""
    more = ["--netns"] if os.geteuid() == 0 else []
    return make_cluster("--preemption", f"--nodes={WIDE}", *more)


def drill(hard, site: Checkout, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """`python -m jobkit drill words`, on the cluster."""
    env = {**site.env, "PYTHONPATH": str(site.folder / "src"), **more}
    command = [sys.executable, "-m", "jobkit", "drill", *words]
    return hard.run(*command, cwd=site.folder, env=env, timeout=3600)


@pytest.fixture(scope="module")
def rows(hard, site: Checkout) -> dict[str, dict[str, str]]:
    """The rows of one drill of all faults."""
    done = drill(hard, site)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    with (site.folder / "logs" / "drill" / "drill.csv").open() as file:
        found = {row["fault"]: row for row in csv.DictReader(file)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: recovered, with bitwise equal" in done.stdout
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_what_it_must_and_no_more(rows, name: str) -> None:
    row = rows[name]
    if name in ROOT_ONLY and os.geteuid() != 0:
        assert row["where"] == "" and "not possible here" in row["note"]
        return
    assert row["first_status"] in FAULTS[name].first and row["note"] == "", row
    assert row["evidence"] or row["first_status"] == "ok"
    assert (row["final_status"], row["same_parameters"], row["orphans"]) == ("ok", "yes", "0"), row
    assert int(row["iterations_lost"]) == LOST.get(name, 0)
    again = name != "slurmctld"
    assert (int(row["attempts"]) > 1, row["detected_s"] != "", row["restart_s"] != "") == (
        again, again, again,
    )  # fmt: skip


def test_the_evidence_is_the_line_that_proves_it(rows) -> None:
    said = {
        "kill": r"srun: error: n2: task 1: Killed",
        "raise": r"rank ?1\]?:? .*faults\.InjectedFault: injected after iteration 25",
        "hang": r"rank 1: no progress .* stuck in faults\.py",
        "warning": r"SIGUSR2 after iteration 2[67], checkpoint saved",
        "term": r"SIGTERM after iteration 2[67], checkpoint saved",
        "scancel": r"CANCELLED",
        "time-limit": r"DUE TO TIME LIMIT|TIMEOUT",
    }
    evidence = {name: rows[name]["evidence"] for name in said}
    wrong = {n: line for n, line in evidence.items() if not re.search(said[n], line)}
    assert not wrong


def test_the_old_attempt_was_held_by_the_fence(rows, site: Checkout) -> None:
    """slurmd was killed, the attempt lived on, and wrote no more once another had begun."""
    folder = site.folder / "logs" / "drill" / "slurmd"
    assert "attempt 0 is fenced" in (folder / "attempts" / "0" / "outcome.json").read_text()
    assert not list((folder / "checkpoints").glob("*-0"))


def test_a_command_under_faults_of_slurm(hard, site: Checkout) -> None:
    """A rank killed on its node, after which the drill submits again, and a cancelled job."""
    (site.folder / "steps.py").write_text(STEPS)
    words = ["--name", "command", "--faults", "kill", "scancel", "bit-flip"]
    done = drill(hard, site, *words, "--", sys.executable, str(site.folder / "steps.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    with (site.folder / "logs" / "command" / "drill.csv").open() as file:
        found = {row["fault"]: row for row in csv.DictReader(file)}
    assert found["kill"]["evidence"] == "rank 1: ended by SIGKILL"
    assert re.search("CANCELLED", found["scancel"]["evidence"])
    for name, first in (("kill", "failed"), ("scancel", "cancelled")):
        row = found[name]
        ended = (row["first_status"], row["final_status"], row["attempts"], row["orphans"])
        assert ended == (first, "ok", "2", "0") and row["same_parameters"] == "", row
    assert "only jobkit's own training" in found["bit-flip"]["note"]


def test_an_ended_drill_leaves_nothing(hard, site: Checkout) -> None:
    """TERM in the middle: the jobs are ended, and what was broken is put right."""
    env = hard.env | site.env | {"PYTHONPATH": str(site.folder / "src")}
    command = [sys.executable, "-m", "jobkit", "drill", "--name", "ended", "--faults", "kill"]
    process = subprocess.Popen(command, cwd=site.folder, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not hard.run("squeue", "-h").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 130
    assert not hard.run("squeue", "-h", "-t", "PENDING,RUNNING").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "kil"], "did you mean 'kill'"),
        (["--at", "64"], "must be from 21 to 60"),
        (["--name", "a/b"], "use letters, digits"),
    ],
)
def test_bad_words_of_a_drill(hard, site: Checkout, words: list[str], said: str) -> None:
    done = drill(hard, site, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr


# --- hpc/minicluster kill and start ---------------------------------------------------------------


def test_a_killed_node_takes_its_jobs_along_and_comes_back(hard, tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo $$ > pid; sleep 99 & wait"
    job = hard.submit("-w", "n4", "-o", "/dev/null", "--wrap", stubborn, cwd=tmp_path)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 100
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hard.door("kill", "n4", "--jobs").stdout.startswith("killed: slurmd.n4 and ")
    assert not Path(f"/proc/{pid.read_text().strip()}").exists() or _ended(int(pid.read_text()))
    again = hard.door("kill", "n4")
    assert again.returncode == 1 and "n4 is not running; start it" in again.stderr
    assert "slurmd.n4" in hard.door("status").stdout
    hard.run("scancel", job)
    assert hard.door("start", "n4").stdout.endswith("started: slurmd.n4\n")
    assert hard.run("srun", "-w", "n4", "hostname").returncode == 0
    assert "daemons: all running" in hard.door("status").stdout


def _ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_killed_controller_comes_back_with_its_jobs(hard) -> None:
    job = hard.submit("-o", "/dev/null", "--wrap", "sleep 40")
    hard.wait_for(job, JobState="RUNNING")
    running, cluster = time.time(), Minicluster(str(hard.layout.root))
    deadline = time.monotonic() + 300
    while cluster.saved_at < running:  # of what it has not saved it knows nothing
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert hard.door("kill", "slurmctld").stdout == "killed: slurmctld\n"
    assert hard.door("start", "slurmctld").stdout.endswith("started: slurmctld\n")
    assert hard.wait(job) == ("COMPLETED", "0:0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kill", "n99"], "must be slurmctld or a node, n1 to n14"),
        (["kill", "slurmctld", "--jobs"], "is for nodes"),
        (["start", "slurmdbd"], "must be slurmctld or a node"),
    ],
)
def test_kill_and_start_with_bad_words(hard, words: list[str], said: str) -> None:
    done = hard.door(*words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr
