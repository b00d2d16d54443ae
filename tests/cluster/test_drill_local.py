"""A drill off Slurm, where run.sh starts the run again."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT
from support.training_programs import STEPS


def drill(folder: Path, *words: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Run `jobkit drill --local`, with its logs in a folder; what it printed, and its rows."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "JOBKIT_LOGS": str(folder / "my logs"),
        "JOBKIT_DATA_DIR": str(folder / "data"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "jobkit", "drill", "--local", "--name", "here", *words],
        env=env, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "my logs" / "here" / "drill.csv").open() as file:
        return done.stdout, {row["fault"]: row for row in csv.DictReader(file)}


def test_a_drill_on_this_machine(tmp_path: Path) -> None:
    """TERM to the ranks, after which run.sh starts them again, and a fault that needs Slurm."""
    said, rows = drill(tmp_path, "--faults", "term", "scancel")
    term, scancel = rows["term"], rows["scancel"]
    assert (term["where"], term["first_status"], term["final_status"]) == (
        "here",
        "preempted",
        "ok",
    )
    assert (term["iterations_lost"], term["same_parameters"], term["orphans"]) == ("0", "yes", "0")
    assert term["attempts"] == "2" and float(term["restart_s"]) > 0
    assert scancel["note"] == "not possible here: it needs Slurm" and scancel["where"] == ""
    assert "1 of 1 faults: recovered" in said


def test_a_drill_of_a_command_on_this_machine(tmp_path: Path) -> None:
    """A program that says its steps and saves each tenth: killed, warned, and ended by TERM."""
    script = tmp_path / "my train.py"
    script.write_text(STEPS)
    faults = ["kill", "warning", "term", "raise"]
    said, rows = drill(
        tmp_path, "--at", "25", "--faults", *faults, "--", sys.executable, str(script)
    )
    ended = {name: row["first_status"] for name, row in rows.items()}
    assert ended == {"kill": "failed", "warning": "preempted", "term": "cancelled", "raise": ""}
    assert rows["kill"]["evidence"] == "rank 1: ended by SIGKILL"
    for name in ("kill", "warning", "term"):
        row = rows[name]
        assert (row["final_status"], row["attempts"], row["orphans"]) == ("ok", "2", "0"), row
        assert row["same_parameters"] == "" and row["iterations_lost"].isdigit(), row
    assert rows["raise"]["note"].startswith("not possible here: only jobkit's own training")
    assert "3 of 3 faults: recovered\n" in said
