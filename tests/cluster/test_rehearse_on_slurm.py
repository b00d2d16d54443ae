"""A rehearsal on a minicluster: the product's own launcher, run.sh, collector and report."""

import os
import sys
from pathlib import Path

from support.place import ROOT


def test_a_rehearsal_of_two_nodes(cluster, tmp_path: Path) -> None:
    words = ["--nodes", "2", "--ranks-per-node", "2", "--keep"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PYTHONPATH": str(ROOT / "src"), "JOBKIT_LOGS": str(tmp_path), "PATH": path}
    done = cluster.run(sys.executable, "-m", "jobkit", "rehearse", *words, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ranks are simulated" in done.stdout
    rows = {line.split(" | ")[0]: line for line in done.stdout.splitlines() if " | " in line}
    assert "4 (2x2)" in rows["| "]
    assert int(rows["| one rank, calls"].split(" | ")[1]) > 0
    (study,) = tmp_path.glob("rehearse-*/rehearse-2x2")
    assert len(list(study.glob("*/metrics/0.*r[1-3].jsonl"))) == 3  # of the ranks above 0
    assert (study / "report.html").exists()
    assert "1 of 1" in (study.parent / "rehearse-2x2.log").read_text()
