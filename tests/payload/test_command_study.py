"""Studies of a plain command on this machine: from run_benchmarks.py to results.csv."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.launch.states import states
from jobkit.outcome.status import RunState
from jobkit.spec.plan import Plan
from support.place import ROOT
from support.report_truth import untrue
from support.training_programs import METERED

PROGRAM = """
import json, os, pathlib, sys, time
folder, rank = pathlib.Path(os.environ["JOBKIT_RUN_DIR"]), os.environ["RANK"]
import beside  # as any script finds the modules beside it
(folder / f"rank-{rank}").write_text(json.dumps(sys.argv[1:]))
if "wait" in sys.argv:
    time.sleep(600)
if "crash" in sys.argv and rank == "1" and os.environ["JOBKIT_ATTEMPT"] == "0":
    raise ValueError("planted fault")
"""
STUDY = """
name = "mine"
command = ["{python}", "{program}", "--batch={{batch}}", "--note={{note}}"]
gpus = [1, 2]
[parameters]
note = "it's $HOME"
batch = "{{total / ranks}}"
[sweep]
total = [8, 12]
[work]
unit = "images"
per_step = "{{total}}"
scaling = "strong"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "my programs"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "train it.py").write_text(PROGRAM)
    return folder / "train it.py"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "JOBKIT_LOGS": str(tmp_path / "my logs")}


def bench(env: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, str(ROOT / "run_benchmarks.py"), "--site", "local", *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=1200)


def found(env: dict[str, str], name: str) -> tuple[Plan, dict[str, RunState]]:
    plan = Plan.read(Path(env["JOBKIT_LOGS"]) / name / "plan.json")
    return plan, states(plan)


def test_a_study_file_becomes_rows_that_are_ok(
    program: Path, env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(STUDY.format(python=sys.executable, program=program))
    done = bench(env, "--study", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    plan, _ = found(env, "mine")
    for run_id, spec in plan.runs.items():
        seen = sorted((plan.paths.run(run_id).folder).glob("rank-*"))
        assert len(seen) == spec.world_size
        batch = spec.columns()["total"] // spec.world_size
        assert all(
            json.loads(p.read_text()) == [f"--batch={batch}", "--note=it's $HOME"] for p in seen
        )
    again = bench(env, "--study", str(file))
    assert "none to start" in again.stdout and again.returncode == 0
    collect = [sys.executable, str(ROOT / "collect_results.py"), "mine"]
    done = subprocess.run(collect, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (plan.paths.results).open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert sorted(row["world_size"] for row in rows) == ["1", "1", "2", "2"]
    assert len({row["series"] for row in rows}) == 2


def test_a_crash_is_told_and_started_again(program: Path, env: dict[str, str]) -> None:
    command = ["--gpus", "2", "--", sys.executable, str(program), "crash"]
    done = bench(env, "--name", "once", *command)
    assert done.returncode == 1, done.stdout
    (state,) = found(env, "once")[1].values()
    assert (state.status, state.exit_code) == ("failed", 1)
    assert state.reason == "ValueError: planted fault" and "train.log:" in state.evidence_file
    done = bench(env, "--name", "again", "--max-restarts", "1", *command)
    assert done.returncode == 0, done.stdout
    (state,) = found(env, "again")[1].values()
    assert (state.status, state.attempts) == ("ok", 2)


def test_torchrun_starts_the_ranks_of_a_command(program: Path, env: dict[str, str]) -> None:
    done = bench(
        env, "--name", "t", "--launcher", "torchrun", "--gpus", "2", "--",
        sys.executable, str(program), "a $$local_rank",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    plan, _ = found(env, "t")
    (run_id,) = plan.runs
    folder = plan.paths.run(run_id).folder
    words = [json.loads((folder / f"rank-{r}").read_text()) for r in (0, 1)]
    assert words == [["a $$local_rank"]] * 2


def test_a_program_with_the_meter_comes_to_a_true_report_off_slurm(
    env: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(METERED)
    command = ["--name", "m", "--gpus", "1", "2", "--", sys.executable, str(script)]
    done = bench(env, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(env["JOBKIT_LOGS"]) / "m"
    plot = {**env, "JOBKIT_PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "plot_results.sh"), str(folder)], env=plot, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert untrue(folder) == []
    with (folder / "scaling.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["world_size"], row["time_of"]) for row in rows] == [("1", "epoch"), ("2", "epoch")]
    # 320 samples in batches of 4 on each rank: 80 steps of one rank, 40 of two.
    steps = [float(row["time_s"]) / float(row["step_time_s"]) for row in rows]
    assert steps == pytest.approx([80, 40])


def test_cancel_ends_a_command(program: Path, env: dict[str, str]) -> None:
    command = ["--name", "long", "--gpus", "2", "--no-wait", "--", sys.executable, str(program)]
    assert bench(env, *command, "wait").returncode == 0
    plan, _ = found(env, "long")
    (run_id,) = plan.runs
    folder, deadline = plan.paths.run(run_id).folder, time.monotonic() + 300
    while len(list(folder.glob("rank-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    words = [sys.executable, "-m", "jobkit", "cancel", "long"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert "its runs were ended" in done.stdout, done.stderr
    (state,) = states(plan).values()
    assert state.status == "cancelled" and re.fullmatch(
        r"rank [01]: ended by SIGTERM", state.reason
    )


def test_a_command_that_is_not_here_is_refused_before_anything_is_written(
    env: dict[str, str], tmp_path: Path
) -> None:
    done = bench(env, "--", "no-such-command")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no command 'no-such-command' on this machine" in done.stderr
    assert not (tmp_path / "my logs").exists()
