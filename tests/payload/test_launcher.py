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
from jobkit.launch.task import children_of
from jobkit.spec.plan import Plan
from support.place import ROOT

DOOR = [sys.executable, str(ROOT / "run_benchmarks.py")]
TINY = ["--train-samples", "256", "--test-samples", "128", "--global-batch-size", "64"]
TINY += ["--site", "local", "--study", "demo", "--breakdown-iterations", "0"]
ENDLESS = ["--strategies", "ddp", "--gpus", "1", "--epochs", "100000", *TINY]
TWO_RANKS = ["--gpus", "2"]
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


@pytest.fixture(scope="module", autouse=True)
def _before() -> set[int]:
    """What runs below the tests of other files, such as the fork server of multiprocessing."""
    return set(children_of(os.getpid()))


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


def test_a_study_and_then_only_what_is_missing(env: dict[str, str]) -> None:
    """From Python, by the few lines of the README, and then from the shell."""
    code = (
        "from jobkit.analysis.collect.results import collect\n"
        "from jobkit.launch.launcher import launch\n"
        "from jobkit.launch.request import LaunchRequest\n"
        "from jobkit.spec.plan import Study\n"
        "study = Study.load('demo', strategies=['ddp'], gpus=[1], repeats=2, epochs=1,\n"
        "                   train_samples=256, test_samples=128, global_batch_size=64,\n"
        "                   breakdown_iterations=0)\n"
        "started = launch(study.expand(), LaunchRequest(site='local'))\n"
        "started.wait()\n"
        "results = collect(started.folder)\n"
        "print(len(results.runs), len(results.epochs), results.runs.status[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "2 2 ok\n", done.stderr
    assert statuses(env, "demo") == ["ok"] * 2
    plan = plan_of(env, "demo")
    lost = next(r for r in plan.runs if r.startswith("ddp"))
    shutil.rmtree(plan.paths.run(lost).folder)
    # Another process, and the machine's own words for what it does.
    words = ["--strategies", "ddp", "--gpus", "1", "--repeats", "2", "--epochs", "1", *TINY]
    again = run(env, *words)
    assert again.returncode == 0, again.stderr
    assert "1 ok already, 1 to start" in again.stdout
    assert "[1/1]" in again.stdout and lost in again.stdout
    assert "all 2 runs are ok" in again.stdout
    assert "none to start" in run(env, *words).stdout


def test_a_run_that_fails_is_told_and_started_again(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make():\n    raise RuntimeError('planted')\n")
    env = {**env, "PYTHONPATH": str(tmp_path), "WANDB_API_KEY": "s3cr3t-of-the-user"}
    words = ["--strategies", "ddp", "--gpus", "1", "--epochs", "1", "--model", "mine:make", *TINY]
    done = run(env, *words)
    assert done.returncode == 1
    assert "planted" in done.stdout and "train.log" in done.stdout
    assert statuses(env, "demo") == ["failed"]
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef make():\n    linear = torch.nn.Linear(3072, 10)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), linear)\n"
    )
    assert run(env, *words).returncode == 0
    assert statuses(env, "demo") == ["ok"]
    left = [p for p in Path(env["JOBKIT_LOGS"]).rglob("*") if p.is_file()]
    assert [p for p in left if b"s3cr3t-of-the-user" in p.read_bytes()] == []


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 130), ("term", 143), ("hangup", 143)])
def test_stopped_leaves_no_orphan_and_can_go_on(
    env: dict[str, str], tmp_path: Path, how: str, code: int
) -> None:
    folder = str(Path(env["JOBKIT_LOGS"]) / how)
    words = [*ENDLESS, *TWO_RANKS] if how == "ctrl-c" else stand_in(tmp_path, folder)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(DOOR[0], [*DOOR, "--name", how, *words], env)
    drained = subprocess.Popen(["cat"], stdin=terminal, stdout=subprocess.PIPE)
    wait_for_epoch(env, how)
    assert len(of_study(folder)) > 2 + (how == "ctrl-c")  # run.sh, torchrun and the ranks
    if how == "ctrl-c":
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


def test_in_the_background_once_and_cancelled_from_elsewhere(env: dict[str, str]) -> None:
    words = ["--name", "back", "--no-wait", *ENDLESS]
    assert run(env, *words).returncode == 0
    wait_for_epoch(env, "back")
    second = run(env, *words)
    assert "1 running already, none to start" in second.stdout
    command = [sys.executable, "-m", "jobkit"]
    shown = subprocess.run(
        [*command, "status", "back", "--json"], env=env, capture_output=True, text=True
    )
    (row,) = json.loads(shown.stdout)["runs"]
    assert row["status"] == "running" and row["epoch"] >= 1 and row["left_s"] > 0
    refused = run(env, *words, "--strategies", "ddp", "fsdp")  # it is not the same study
    assert refused.returncode == 2
    assert "is being run by process" in refused.stderr and refused.stderr.count("\n") == 1
    done = subprocess.run([*command, "cancel", "back"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "its runs were ended" in done.stdout
    assert of_study(str(Path(env["JOBKIT_LOGS"]) / "back")) == []
    assert statuses(env, "back") == ["cancelled"]


def test_nothing_runs_below_this_test(_before: set[int]) -> None:
    assert set(children_of(os.getpid())) <= _before
