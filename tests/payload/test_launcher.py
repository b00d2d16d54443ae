"""run_benchmarks.py on this machine: real runs, real signals, nothing left behind."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.launch.states import States
from jobkit.spec.study import Plan
from support.place import ROOT, until
from support.rigs import processes_with

DOOR = [sys.executable, str(ROOT / "run_benchmarks.py")]
# A rank without torch that has epochs: for what happens to processes, whatever they compute.
STAND_IN = """
import time
from jobkit import meter
meter.start(unit="steps")
for epoch in range(100_000):
    time.sleep(0.05)
    meter.step(work=1)
    meter.epoch(epoch)
"""


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "my logs"))
    monkeypatch.setenv("JOBKIT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "my logs"


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=1200)


def statuses(folder: Path) -> list[str]:
    return [state.status for state in States(Plan.read(folder / "plan.json")).look().values()]


def wait_for_epoch(folder: Path) -> None:
    files, word = "*/metrics/*.jsonl", '"kind":"epoch"'
    until(lambda: any(word in x.read_text() for x in folder.glob(files)), "an epoch")


def stand_in(folder: Path) -> list[str]:
    program = folder.parents[1] / "stand_in.py"
    program.write_text(STAND_IN)
    return ["--site", "local", "--gpus", "1", "--", sys.executable, str(program), str(folder)]


# The few lines of the README.
FROM_PYTHON = """
from jobkit.analysis.collect import collect
from jobkit.launch.launcher import launch
from jobkit.launch.command import LaunchRequest
from jobkit.spec.study import Study
study = Study.of_command(("true",), name="from-python", gpus=(1,), repeats=2)
started = launch(study.expand(), LaunchRequest(site="local"))
started.wait()
results = collect(started.folder)
print(len(results.runs), results.runs.status[0])
"""


def test_a_study_and_then_only_what_is_missing(logs: Path) -> None:
    done = run(sys.executable, "-c", FROM_PYTHON)
    assert done.stdout == "2 ok\n", done.stderr
    plan = Plan.read(logs / "from-python" / "plan.json")
    lost = next(iter(plan.runs))
    shutil.rmtree(plan.paths.run(lost).folder)
    # Another process, and the machine's own words for what it does.
    words = ["--name", "from-python", "--gpus", "1", "--repeats", "2", "--site", "local"]
    again = run(*DOOR, *words, "--", "true")
    assert again.returncode == 0, again.stderr
    assert "1 ok already, 1 to start" in again.stdout
    assert "[1/1]" in again.stdout and lost in again.stdout
    assert "all 2 runs are ok" in again.stdout
    assert "none to start" in run(*DOOR, *words, "--", "true").stdout


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 130), ("SIGTERM", 143), ("SIGHUP", 143)])
def test_stopped_leaves_no_orphan_and_can_go_on(logs: Path, how: str, code: int) -> None:
    folder = logs / how
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(DOOR[0], [*DOOR, "--name", how, *stand_in(folder)])
    drained = subprocess.Popen(["cat"], stdin=terminal, stdout=subprocess.PIPE)
    wait_for_epoch(folder)
    assert len(processes_with(folder)) > 2  # run.sh, what starts the ranks, and the ranks
    if code == 130:
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.Signals[how])
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    said, _ = drained.communicate()
    assert os.waitstatus_to_exitcode(status) == code, said[-2000:]
    assert processes_with(folder) == [] and statuses(folder) == ["cancelled"]
    assert b"to continue, run the same command again" in said


def test_the_death_of_the_one_who_watches_ends_the_runs(logs: Path) -> None:
    folder = logs / "killed"
    with subprocess.Popen([*DOOR, "--name", "killed", *stand_in(folder)], stdout=-1) as watcher:
        wait_for_epoch(folder)
        watcher.kill()
    until(lambda: not processes_with(folder), "the end of its processes")


def test_in_the_background_once_and_cancelled_from_elsewhere(logs: Path) -> None:
    folder = logs / "back"
    words = ["--name", "back", "--no-wait", *stand_in(folder)]
    assert run(*DOOR, *words).returncode == 0
    wait_for_epoch(folder)
    assert "1 running already, none to start" in run(*DOOR, *words).stdout
    command = [sys.executable, "-m", "jobkit"]
    (row,) = json.loads(run(*command, "status", "back", "--json").stdout)["runs"]
    assert row["status"] == "running" and row["epoch"] >= 1
    refused = run(*DOOR, "--repeats", "2", *words)  # it is not the same study
    assert refused.returncode == 2
    assert "is being run by process" in refused.stderr and refused.stderr.count("\n") == 1
    done = run(*command, "cancel", "back")
    assert done.returncode == 0 and "its runs were ended" in done.stdout
    assert processes_with(folder) == [] and statuses(folder) == ["cancelled"]
