"""Drills on a real Slurm: of a command without torch, and (long) of the training, all faults."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.drill.faults import FAULTS
from support.checkout import Checkout
from support.place import until
from support.records import rows_of
from support.training_programs import UNTIL_HIT


@pytest.fixture(scope="module")
def hit(kit: Checkout) -> list[str]:
    (kit.folder / "hit.py").write_text(UNTIL_HIT)
    return ["--", sys.executable, str(kit.folder / "hit.py")]


def drill_rows(path: Path) -> dict[str, dict[str, str]]:
    return {row["fault"]: row for row in rows_of(path)}


def test_a_command_under_faults_of_slurm(cluster, kit: Checkout, hit: list[str]) -> None:
    """A rank killed on its node, after which the drill submits again, and a cancelled job."""
    words = ["--faults", "kill", "scancel", "raise", *hit]
    done = kit.python(cluster, "-m", "jobkit", "drill", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 faults: recovered\n" in done.stdout
    found = drill_rows(kit.folder / "logs" / "drill" / "drill.csv")
    assert found["kill"]["evidence"] == "rank 1: ended by SIGKILL"
    assert "CANCELLED" in found["scancel"]["evidence"]
    for name, first in (("kill", "failed"), ("scancel", "cancelled")):
        row = found[name]
        ended = (row["first_status"], row["final_status"], row["attempts"], row["orphans"])
        assert ended == (first, "ok", "2", "0") and row["same_parameters"] == "", row
    assert "only jobkit's own training" in found["raise"]["note"]


def test_an_ended_drill_leaves_no_job(cluster, kit: Checkout, hit: list[str]) -> None:
    env = {**cluster.env, **kit.env, "PYTHONPATH": str(kit.folder / "src")}
    words = ["-m", "jobkit", "drill", "--faults", "kill", *hit]
    queued = ["squeue", "-h", "-t", "PENDING,RUNNING", "--format=%j"]
    process = subprocess.Popen([sys.executable, *words], cwd=kit.folder, env=env)
    until(lambda: "drill-reference" in cluster.run(*queued).stdout, "its first job")
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 130
    assert "drill-" not in cluster.run(*queued).stdout


@pytest.mark.long
def test_a_fault_of_the_training_costs_what_it_must_and_no_more(cluster, kit: Checkout) -> None:
    """And the evidence is the line that proves it."""
    done = kit.python(cluster, "-m", "jobkit", "drill", "--patience", "800")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: recovered, with bitwise equal" in done.stdout
    rows = drill_rows(kit.folder / "logs" / "drill" / "drill.csv")
    lost = {"kill": 5, "raise": 5, "hang": 5}
    for name, fault in FAULTS.items():
        row = rows[name]
        assert (row["first_status"], row["note"]) == (fault.first, ""), row
        ended = (row["final_status"], row["same_parameters"], row["orphans"])
        assert ended == ("ok", "yes", "0"), row
        assert int(row["iterations_lost"]) == lost.get(name, 0), row
        assert int(row["attempts"]) == 2 and row["detected_s"] and row["restart_s"], row
    said = {
        "kill": r"srun: error: n\d: task 1: Killed",
        "raise": r"rank ?1\]?:? .*RuntimeError: injected after iteration 25",
        "hang": r"imed out",
        "warning": r"SIGUSR2 after iteration 2[67], checkpoint saved",
        "term": r"SIGTERM after iteration 2[67], checkpoint saved",
        "scancel": r"CANCELLED",
        "time-limit": r"DUE TO TIME LIMIT|TIMEOUT",
    }
    evidence = {name: rows[name]["evidence"] for name in said}
    assert not {n: line for n, line in evidence.items() if not re.search(said[n], line)}
