"""Readers that leave, and a terminal that closes: nothing is lost but what is printed."""

import os
import subprocess
import sys
from pathlib import Path

from jobkit.paths import StudyPaths
from support.place import ROOT

STUDY = "run_benchmarks.py --site local --gpus 1 --repeats 1 --name s -- sleep 1"  # not a training


def shell(line: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    how = {"env": {**os.environ, **environ}, "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", line], timeout=800, **how)


def test_a_study_goes_on_when_its_output_is_lost() -> None:
    done = shell(f"{sys.executable} {ROOT}/{STUDY} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{sys.executable} -m jobkit status s --json")
    assert '"ok": 1' in done.stdout


def test_one_training_ends_well_though_nobody_reads_its_output(tmp_path: Path) -> None:
    words = f"--nproc-per-node 1 --run-dir {tmp_path}/run --strategy single --device cpu"
    words += " --dataset synthetic --train-samples 128 --test-samples 64 --epochs 1 --threads 1"
    pipe = "| head -1; exit ${PIPESTATUS[0]}"
    done = shell(f"bash {ROOT}/run.sh {words} {pipe}", JOBKIT_PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    paths = StudyPaths(tmp_path).run("run")
    assert '"status": "ok"' in paths.outcome(0).read_text()
    assert paths.metrics(0).read_text().count('"kind":"run_end"') == 1
