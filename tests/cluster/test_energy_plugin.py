"""A node's energy on a real Slurm: its plugin, and the ranks, read a simulated counter."""

import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.measured import observed_of
from jobkit.analysis.collect.records import read_run
from jobkit.analysis.collect.samples import use_row
from jobkit.paths import RunPaths
from support.place import ROOT

# About 4 s: Slurm's plugin and the ranks read the counter once per second. The warm-up is long,
# as its end must come after the first sample.
PROGRAM = """
import time
from jobkit import meter
meter.start(unit="samples", work_per_step=20, warmup_steps=15)
for step in range(40):
    time.sleep(0.1)
    meter.step()
meter.end()
"""
SACCT = ("-P", "-n", "-o", "State,ConsumedEnergyRaw")


def energies(shown: str) -> list[float]:
    """The joules of the rows of a job that has ended, where there are any."""
    rows = [line.split("|") for line in shown.splitlines()]
    return [
        float(text) for state, text in rows if state == "COMPLETED" and 0 < int(text or 0) < 2**31
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="--energy needs root")
def test_an_exclusive_job_counts_its_nodes_energy(
    make_cluster: Callable[..., object], tmp_path: Path
) -> None:
    cluster = make_cluster("--energy", "--nodes", "1", "--gpus", "0")
    (tmp_path / "loop.py").write_text(PROGRAM)
    words = ["--exclusive", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0"]
    words += [f"--output={tmp_path}/job.log", f"--error={tmp_path}/job.err"]
    run = tmp_path / "study" / "run"
    words += [str(ROOT / "run.sh"), "--run-dir", str(run), "--no-auto", "--", sys.executable]
    job_id = cluster.submit(*words, str(tmp_path / "loop.py"), cwd=ROOT)
    ended = cluster.wait(job_id)
    assert ended.state == "COMPLETED", (tmp_path / "job.err").read_text()
    paths = RunPaths(run)
    records = read_run(paths, None)
    row = use_row(records, observed_of(paths, records, None), {"nodes": 1, "world_size": 1}, None)
    assert row["energy_source"] == "pm_counters (node)" and row["joules_of"] == "node"
    seconds = records.samples[-1]["at_s"]
    # The counter is 100 W; the machine may be too busy to advance it in time.
    assert 0 < row["energy_node_j"] <= 100 * (seconds + 60)
    assert row["joules_per_work"] > 0
    deadline = time.monotonic() + 300  # sacct is told of a job's end a little later
    while not energies(cluster.run("sacct", *SACCT, "-j", job_id).stdout):
        assert time.monotonic() < deadline, "sacct shows no energy"
        time.sleep(0.5)
    a_study_has_its_energy(cluster, tmp_path)


def a_study_has_its_energy(cluster: Any, folder: Path) -> None:
    """From submission to the table."""
    words = [sys.executable, str(ROOT / "run_benchmarks.py"), "--name", "watts", "--exclusive"]
    words += ["--no-collect"]
    words += ["--site", "minicluster", "--gpu-request", "none", "--gpus", "1", "--no-auto", "--"]
    env = {"JOBKIT_LOGS": str(folder / "logs"), "PYTHONPATH": str(ROOT / "src")}
    done = cluster.run(*words, sys.executable, str(folder / "loop.py"), cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    collect = [sys.executable, str(ROOT / "collect_results.py"), "watts"]
    deadline, row = time.monotonic() + 300, {"slurm_energy_j": ""}
    while not row["slurm_energy_j"]:  # sacct is told a little later
        assert time.monotonic() < deadline, row
        done = cluster.run(*collect, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        with (folder / "logs" / "watts" / "results.csv").open() as file:
            (row,) = csv.DictReader(file)
    assert 0 < float(row["slurm_energy_j"]) < 2**31
    assert (row["joules_of"], row["energy_source"]) == ("node", "pm_counters (node)")
    assert float(row["joules_per_work"]) > 0
