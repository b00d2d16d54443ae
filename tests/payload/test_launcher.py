"""run_benchmarks.py on this machine: real runs, real signals, nothing left behind."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.launch.states import states
from jobkit.spec.plan import Plan
from support.place import ROOT

DOOR = [sys.executable, str(ROOT / "run_benchmarks.py")]
TINY = ["--train-samples", "256", "--test-samples", "128", "--global-batch-size", "64"]
TINY += ["--site", "local", "--study", "demo", "--breakdown-iterations", "0"]
ENDLESS = ["--strategies", "ddp", "--gpus", "1", "--epochs", "100000", *TINY]
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


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A user's environment with logs and data of the test's own, in a path with a space."""
    logs = tmp_path / "my logs"
    return {**os.environ, "JOBKIT_LOGS": str(logs), "JOBKIT_DATA_DIR": str(tmp_path / "data")}


def run(env: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*DOOR, *words], env=env, capture_output=True, text=True, timeout=1200)


def plan_of(env: dict[str, str], name: str) -> Plan:
    return Plan.read(Path(env["JOBKIT_LOGS"]) / name / "plan.json")


def statuses(env: dict[str, str], name: str) -> list[str]:
    return sorted(state.status for state in states(plan_of(env, name)).values())


def of_study(folder: str) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def wait_for_epoch(env: dict[str, str], name: str) -> None:
    """Until the study's run has trained for an epoch."""
    deadline = time.monotonic() + 480
    pattern = f"{name}/*/metrics/*.jsonl"
    while time.monotonic() < deadline:
        for path in Path(env["JOBKIT_LOGS"]).glob(pattern):
            if '"kind":"epoch"' in path.read_text():
                return
        time.sleep(0.1)
    raise AssertionError("no epoch in time")


def stand_in(tmp_path: Path, folder: str) -> list[str]:
    """The words for a run of the stand-in, whose command line names the study's folder too."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    return ["--site", "local", "--gpus", "1", "--", sys.executable, str(program), folder]


# The few lines of the README.
FROM_PYTHON = """
from jobkit.analysis.collect import collect
from jobkit.launch.launcher import launch
from jobkit.launch.request import LaunchRequest
from jobkit.spec.plan import Study
study = Study.of_command(("true",), name="from-python", gpus=(1,), repeats=2)
started = launch(study.expand(), LaunchRequest(site="local"))
started.wait()
results = collect(started.folder)
print(len(results.runs), results.runs.status[0])
"""


def test_a_study_and_then_only_what_is_missing(env: dict[str, str]) -> None:
    """From Python, and then from the shell."""
    argv = [sys.executable, "-c", FROM_PYTHON]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.stdout == "2 ok\n", done.stderr
    plan = plan_of(env, "from-python")
    lost = next(iter(plan.runs))
    shutil.rmtree(plan.paths.run(lost).folder)
    # Another process, and the machine's own words for what it does.
    words = ["--name", "from-python", "--gpus", "1", "--repeats", "2", "--site", "local"]
    again = run(env, *words, "--", "true")
    assert again.returncode == 0, again.stderr
    assert "1 ok already, 1 to start" in again.stdout
    assert "[1/1]" in again.stdout and lost in again.stdout
    assert "all 2 runs are ok" in again.stdout
    assert "none to start" in run(env, *words, "--", "true").stdout


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("ctrl-c", 130),
        ("term", 143),
        ("hangup", 143),
        pytest.param("training", 130, marks=pytest.mark.long),
    ],
)
def test_stopped_leaves_no_orphan_and_can_go_on(
    env: dict[str, str], tmp_path: Path, how: str, code: int
) -> None:
    folder = str(Path(env["JOBKIT_LOGS"]) / how)
    words = ENDLESS if how == "training" else stand_in(tmp_path, folder)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(DOOR[0], [*DOOR, "--name", how, *words], env)
    drained = subprocess.Popen(["cat"], stdin=terminal, stdout=subprocess.PIPE)
    wait_for_epoch(env, how)
    assert len(of_study(folder)) > 2  # run.sh, what starts the ranks, and the ranks
    if code == 130:
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGTERM if how == "term" else signal.SIGHUP)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    said, _ = drained.communicate()
    assert os.waitstatus_to_exitcode(status) == code, said[-2000:]
    assert of_study(folder) == []
    assert b"to continue, run the same command again" in said
    assert statuses(env, how) == ["cancelled"]


def test_the_death_of_the_one_who_watches_ends_the_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    folder = str(Path(env["JOBKIT_LOGS"]) / "killed")
    words = ["--name", "killed", *stand_in(tmp_path, folder)]
    watcher = subprocess.Popen([*DOOR, *words], env=env, stdout=-1)
    wait_for_epoch(env, "killed")
    watcher.kill()
    watcher.communicate()
    deadline = time.monotonic() + 300
    while of_study(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert of_study(folder) == []


def test_in_the_background_once_and_cancelled_from_elsewhere(
    env: dict[str, str], tmp_path: Path
) -> None:
    folder = str(Path(env["JOBKIT_LOGS"]) / "back")
    words = ["--name", "back", "--no-wait", *stand_in(tmp_path, folder)]
    assert run(env, *words).returncode == 0
    wait_for_epoch(env, "back")
    second = run(env, *words)
    assert "1 running already, none to start" in second.stdout
    command = [sys.executable, "-m", "jobkit"]
    shown = subprocess.run(
        [*command, "status", "back", "--json"], env=env, capture_output=True, text=True
    )
    (row,) = json.loads(shown.stdout)["runs"]
    assert row["status"] == "running" and row["epoch"] >= 1
    refused = run(env, "--repeats", "2", *words)  # it is not the same study
    assert refused.returncode == 2
    assert "is being run by process" in refused.stderr and refused.stderr.count("\n") == 1
    done = subprocess.run([*command, "cancel", "back"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "its runs were ended" in done.stdout
    assert of_study(folder) == []
    assert statuses(env, "back") == ["cancelled"]
