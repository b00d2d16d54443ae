"""The process that runs a study on this machine, with a stand-in for run.sh: what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from jobkit.launch.command import Order
from jobkit.outcome.state import run_state
from jobkit.spec.study import Plan
from support.fake_study import logs, make_plan

MARKER = "s3cr3t-of-the-user"
DRIVER = """
import sys
from pathlib import Path
from jobkit.launch import command
from jobkit.launch.local import driver
command.RUN_SH = Path(sys.argv[1])
sys.exit(driver.main())
"""


def drive(folder: Path, plan: Plan, text: str, at_once: int = 1, **env: str) -> list[str]:
    """Run the plan, with this text for run.sh; return the environment that its runs saw."""
    seen, script = folder / "seen", folder / "run.sh"
    script.write_text(f'env > "{seen}.part"; mv "{seen}.part" "{seen}"; {text}\n')
    order = Order(folder=str(plan.paths.folder), run_ids=list(plan.runs), at_once=at_once)
    own = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    argv = [sys.executable, "-c", DRIVER, str(script)]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, text=True, env=own | env) as driver:
        assert driver.stdin
        with driver.stdin:
            json.dump(asdict(order), driver.stdin)
        if text.startswith("sleep"):
            while not seen.exists() and driver.poll() is None:
                time.sleep(0.05)
            driver.send_signal(signal.SIGTERM)
        driver.wait()
    return seen.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("exit 0", "failed", 0),  # it leaves no record: no run is ok without one
        ("exit 1", "failed", 1),
        ("kill -9 $PPID", "failed", None),
        ("sleep 100", "cancelled", 143),
    ],
)
def test_nothing_of_the_environment_is_left_on_disk(
    tmp_path: Path, text: str, status: str, code: int | None
) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    assert f"WANDB_API_KEY={MARKER}" in drive(tmp_path, plan, text, WANDB_API_KEY=MARKER)
    files = [p for p in logs().rglob("*") if p.is_file()]
    assert [p for p in files if MARKER.encode() in p.read_bytes()] == []
    state = run_state(plan.paths.run(next(iter(plan.runs))))
    assert (state.status, state.exit_code) == (status, code), state


@pytest.mark.parametrize(
    "devices", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "1,3"}]
)
def test_a_run_sees_the_devices_that_its_user_sees(tmp_path: Path, devices: dict[str, str]) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    outer = {"SLURM_JOB_ID": "7"}  # of an outer job
    seen = drive(tmp_path, plan, "exit 0", **outer, **devices)
    shown = [line for line in seen if line.startswith(("CUDA_VISIBLE", "SLURM_"))]
    assert shown == [f"{name}={value}" for name, value in devices.items()]


def test_runs_at_work_at_a_time_see_gpus_of_their_own(tmp_path: Path) -> None:
    """Each run waits until both have begun."""
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=2)
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "GPU 0: a (UUID: GPU-a)"; echo "GPU 1: b (UUID: GPU-b)"\n')
    smi.chmod(0o755)
    both = f'while [ "$(ls {tmp_path} | grep -c "^gpu")" -lt 2 ]; do sleep 0.05; done'
    text = f"touch {tmp_path}/gpu$CUDA_VISIBLE_DEVICES; {both}"
    drive(tmp_path, plan, text, at_once=2, PATH=f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    assert sorted(path.name for path in tmp_path.glob("gpu*")) == ["gpu0", "gpu1"]


def test_runs_are_started_one_after_the_other(tmp_path: Path) -> None:
    """Two at a time would each be measured beside the other."""
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=3)
    work = tmp_path / "at-work"
    drive(tmp_path, plan, f"mkdir {work} || touch {tmp_path}/beside; sleep 0.3; rmdir {work}")
    assert not (tmp_path / "beside").exists()
    assert [p.name for p in plan.paths.folder.glob("*/job.json")] == ["job.json"] * 3
