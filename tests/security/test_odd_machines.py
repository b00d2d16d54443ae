"""Odd machines: jumped clocks, folders of any name, and readers that leave."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import slurm_submit as submit
from jobkit.launch.command import LaunchRequest
from jobkit.launch.launcher import prepare
from jobkit.launch.site import Site
from jobkit.launch.slurm_options import make_batches
from jobkit.launch.states import States, progress
from jobkit.paths import StudyPaths, write_json
from jobkit.processes import process_start
from jobkit.spec.study import Study
from support.fake_study import FakeRun, make_plan
from support.place import ROOT

HOUR = 3600.0


@pytest.mark.parametrize(
    ("jump", "key", "status"),
    [(-HOUR, "now", "running"), (HOUR, "of another", "pending"), (0.0, None, "pending")],
)
def test_a_run_is_of_the_launcher_whose_key_it_has_whatever_the_clock(jump, key, status) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    ((run_id, spec),) = plan.runs.items()
    paths = FakeRun(plan.paths.folder, run_id, spec).begin().train(0).flush().paths
    now = time.time()
    own = {"pid": os.getpid(), "pid_start": process_start(os.getpid()), "started": now + jump}
    own |= {"host": socket.gethostname()}
    write_json(paths.job, {**own, "ended": None, "first_attempt": 0, "order": key})
    write_json(plan.paths.launcher, {**own, "started": now, "key": "now", "run_ids": [run_id]})
    state = States(plan).look()[run_id]
    assert state.status == status
    at = progress(paths, spec, replace(state, status="running"))
    assert at.elapsed_s is not None and at.elapsed_s >= 0


@pytest.mark.parametrize("name", ['it\'s a "b"', "$(id) `id` $HOME", "dänisch \u2603"])
@pytest.mark.parametrize(("repeats", "log"), [(1, "17_0_log.out"), (3, "17_3_0_log.out")])
def test_slurms_log_is_in_a_folder_of_any_name(tmp_path, monkeypatch, name, repeats, log) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / name / "logs"))
    plan = Study(name="s", strategies=("ddp",), gpus=(2,), repeats=repeats).expand()
    (batch,) = make_batches(plan, list(plan.runs), Site(name="here"), LaunchRequest())
    text = submit.script(batch, plan.paths.submitit)
    line = next(line for line in text.splitlines() if line.startswith("#SBATCH --output="))
    quoted = line.removeprefix("#SBATCH --output=")  # as a shell, sbatch takes the quotes off
    path = subprocess.check_output(["bash", "-c", f"printf %s {quoted}"], text=True)
    for pattern, value in {"%j": "17", "%A": "17", "%a": "3"}.items():  # Slurm's
        path = path.replace(pattern, value)
    assert path == str(tmp_path / name / "logs" / "s" / ".submitit" / log)


@pytest.mark.parametrize(("name", "site"), [("100%", "minicluster"), ("a\nb", "local")])
def test_a_path_that_cannot_be_used_is_refused(tmp_path, monkeypatch, name, site) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / name))
    plan = Study(name="s", strategies=("single",), gpus=(1,)).expand()
    with pytest.raises(UsageError, match="its path has"):
        prepare(plan, LaunchRequest(site=site))
    assert not (tmp_path / name).exists()


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
