"""The process that runs a study on this machine, with a stand-in for run.sh: what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from jobkit.launch.command import Order
from jobkit.outcome.status import run_state
from jobkit.spec.plan import Plan
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
ENDINGS = {"ok": "exit 0", "failed": "exit 1", "killed": "kill -9 $PPID", "endless": "sleep 100"}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", MARKER)


def drive(
    folder: Path, plan: Plan, how: str, env: Mapping[str, str] | None = None, at_once: int = 1
) -> list[str]:
    """Run the plan; return the lines of the environment that its runs saw."""
    seen, script = folder / "seen", folder / "run.sh"
    script.write_text(f'env > "{seen}.part"; mv "{seen}.part" "{seen}"; {ENDINGS[how]}\n')
    order = Order(folder=str(plan.paths.folder), run_ids=list(plan.runs), at_once=at_once)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(script)], stdin=-1, stdout=-1, text=True, env=env
    )
    assert driver.stdin and driver.stdout
    with driver.stdin:
        json.dump(asdict(order), driver.stdin)
    if how == "endless":
        while not seen.exists() and driver.poll() is None:
            time.sleep(0.05)
        driver.send_signal(signal.SIGTERM)
    driver.wait()
    driver.stdout.close()
    return seen.read_text().splitlines()


@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_of_the_environment_is_left_on_disk(tmp_path: Path, how: str) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    assert f"WANDB_API_KEY={MARKER}" in drive(tmp_path, plan, how)
    files = [p for p in logs().rglob("*") if p.is_file()]
    assert [p for p in files if MARKER.encode() in p.read_bytes()] == []
    state = run_state(plan.paths.run(next(iter(plan.runs))))
    # The stand-in for run.sh leaves no record: no run is ok without one.
    assert state.status == ("cancelled" if how == "endless" else "failed"), state
    assert state.exit_code == {"ok": 0, "failed": 1, "killed": None, "endless": 143}[how]


@pytest.mark.parametrize("given", [None, "", "1,3"])
def test_a_run_sees_the_devices_that_its_user_sees(tmp_path: Path, given: str | None) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,))
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    env |= {"SLURM_JOB_ID": "7"}  # of an outer job
    env |= {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    seen = drive(tmp_path, plan, "ok", env)
    expected = [] if given is None else [f"CUDA_VISIBLE_DEVICES={given}"]
    assert [line for line in seen if "CUDA_VISIBLE" in line] == expected
    assert not [line for line in seen if line.startswith("SLURM_")]


def test_runs_at_work_at_a_time_see_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run waits until both have begun."""
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=2)
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "GPU 0: a (UUID: GPU-a)"; echo "GPU 1: b (UUID: GPU-b)"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = f'while [ "$(ls {tmp_path} | grep -c "^gpu")" -lt 2 ]; do sleep 0.05; done'
    monkeypatch.setitem(ENDINGS, "both", f"touch {tmp_path}/gpu$CUDA_VISIBLE_DEVICES; {both}")
    drive(tmp_path, plan, "both", dict(os.environ), at_once=2)
    assert sorted(path.name for path in tmp_path.glob("gpu*")) == ["gpu0", "gpu1"]


def test_runs_are_started_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time would each be measured beside the other."""
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=3)
    work = tmp_path / "at-work"
    alone = f"mkdir {work} || touch {tmp_path}/beside; sleep 0.3; rmdir {work}"
    monkeypatch.setitem(ENDINGS, "alone", alone)
    drive(tmp_path, plan, "alone")
    assert not (tmp_path / "beside").exists()
    assert [p.name for p in plan.paths.folder.glob("*/job.json")] == ["job.json"] * 3
