"""A drill off Slurm, where run.sh starts the run again."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT


def test_a_drill_on_this_machine(tmp_path: Path) -> None:
    """TERM to the ranks, after which run.sh starts them again, and a fault that needs Slurm."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "JOBKIT_LOGS": str(tmp_path / "my logs"),
        "JOBKIT_DATA_DIR": str(tmp_path / "data"),
    }
    words = ["--local", "--name", "here", "--faults", "term", "scancel"]
    done = subprocess.run(
        [sys.executable, "-m", "jobkit", "drill", *words],
        env=env, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "my logs" / "here" / "drill.csv").open() as file:
        term, scancel = csv.DictReader(file)
    assert (term["where"], term["first_status"], term["final_status"]) == (
        "here",
        "preempted",
        "ok",
    )
    assert (term["iterations_lost"], term["same_parameters"], term["orphans"]) == ("0", "yes", "0")
    assert term["attempts"] == "2" and float(term["restart_s"]) > 0
    assert scancel["note"] == "not possible here: it needs Slurm" and scancel["where"] == ""
    assert "1 of 1 faults: recovered" in done.stdout
