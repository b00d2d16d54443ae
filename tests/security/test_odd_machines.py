"""Odd machines: no home, jumped clocks, small limits, narrow terminals; loopback only."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobkit.launch.follow.progress import progress
from jobkit.launch.states import States
from jobkit.outcome.status import run_state
from jobkit.paths import StudyPaths
from jobkit.processes import process_start
from jobkit.spec.plan import Plan
from support.fake_study import FakeRun, make_plan, whole_run, whole_study
from support.place import ROOT

HOUR = 3600.0
PYTHON = sys.executable
# Root without its powers over files, which is another user to a folder that is closed to writing.
POWERLESS = ["setpriv", "--bounding-set=-all"]
NOBODY = "setpriv --reuid=54321 --regid=54321 --clear-groups --inh-caps=+dac_read_search "
NOBODY += "--ambient-caps=+dac_read_search"
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)
SETTINGS = "--dataset synthetic --train-samples 128 --test-samples 64 --epochs 1 --threads 1"


def run(*words: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=800, **more)


def jobkit(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return run(PYTHON, "-m", "jobkit", *words, env={**os.environ, **environ})


def at_work(plan: Plan, started: float, key: str | None) -> str:
    """A run of this process, started by the launcher of this key; its id."""
    run_id, spec = next(iter(plan.runs.items()))
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0).flush()
    own = {"pid": os.getpid(), "pid_start": process_start(os.getpid())}
    own |= {"host": socket.gethostname()}
    job = {**own, "started": started, "ended": None, "first_attempt": 0, "order": key}
    plan.paths.run(run_id).job.write_text(json.dumps(job))
    record = {**own, "started": time.time(), "key": "now", "run_ids": list(plan.runs)}
    plan.paths.launcher.write_text(json.dumps(record))
    return run_id


@pytest.mark.parametrize("jump", [-HOUR, 0.0, HOUR])
def test_a_run_is_of_the_launcher_whose_key_it_has_whatever_the_clock(jump: float) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id = at_work(plan, time.time() + jump, "now")
    assert States(plan).look()[run_id].status == "running"


@pytest.mark.parametrize("jump", [-HOUR, 0.0, HOUR])
@pytest.mark.parametrize("key", ["of another", None])
def test_a_run_of_an_earlier_launcher_is_pending(jump: float, key: str | None) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id = at_work(plan, time.time() + jump, key)
    assert States(plan).look()[run_id].status == "pending"


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_the_time_of_a_run_at_work_is_not_the_clocks(jump: float) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id = at_work(plan, time.time() + jump, "now")
    at = progress(plan.paths.run(run_id), plan.runs[run_id], 0)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (process_start(os.getpid()) or 0) / 100
    assert at.elapsed_s == pytest.approx(age, abs=60)
    assert at.left_s is not None and at.left_s >= 0


def test_the_time_of_a_run_that_ended_is_not_the_clocks() -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id = next(iter(plan.runs))
    whole_run(plan, run_id)
    paths = plan.paths.run(run_id)
    job = {"pid": 1, "started": 9e9, "ended": 5.0, "elapsed_s": 7.5, "exit_code": 0}
    paths.job.write_text(json.dumps(job))
    assert progress(paths, plan.runs[run_id], 0).elapsed_s == 7.5
    paths.job.write_text(json.dumps({**job, "elapsed_s": None}))
    assert progress(paths, plan.runs[run_id], 0).elapsed_s == 0.0


@pytest.mark.parametrize(("age", "status"), [(50, "running"), (-50, "running"), (-HOUR, "failed")])
def test_no_age_is_negative(age: float, status: str) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id, spec = next(iter(plan.runs.items()))
    made = FakeRun(plan.paths.folder, run_id, spec).begin().train(0).flush()
    for path in (*made.paths.folder.rglob("*"),):
        os.utime(path, (time.time() - age,) * 2)
    state = run_state(made.paths)
    assert state.status == status and not re.search(r"-\d+ s", state.reason)


@pytest.mark.parametrize("columns", [1, 20, 40, 60, 100, 5000])
def test_no_width_of_a_terminal_loses_a_run_or_its_epochs(columns: int) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1, 2))
    done = jobkit("status", "s", COLUMNS=str(columns))
    said = "".join(done.stdout.split())
    assert done.returncode == 0 and all(run_id in said for run_id in plan.runs)
    assert said.count("3/3") == 2


def test_cron_gives_no_environment() -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    environ = {"JOBKIT_LOGS": os.environ["JOBKIT_LOGS"]}
    for name in ("collect_results.py", "plot_results.py"):
        done = run(PYTHON, str(ROOT / name), "s", env=environ)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert plan.paths.report.exists()
    done = run("/bin/bash", str(ROOT / "run.sh"), "--check", env={"JOBKIT_PYTHON": PYTHON})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [["-O"], ["-X", "dev", "-W", "error"]])
def test_options_of_python_change_nothing(options: list[str]) -> None:
    whole_study("s", strategies=("ddp",), gpus=(1, 2))
    for words in (["status", "s"], ["collect", "s"], ["plot", "s"]):
        done = run(PYTHON, *options, "-m", "jobkit", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@as_root
def test_a_user_id_without_a_name_and_without_home() -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("HOME", "JOBKIT_DATA_DIR")}
    whole_study("s", strategies=("ddp",), gpus=(1,))
    words = [*NOBODY.split(), PYTHON, "-m", "jobkit"]
    for more in (["status", "s"], ["run", "--study", "demo", "--dry-run", "--site", "local"]):
        done = run(*words, *more, env=environ)
        assert done.returncode == 0, done.stderr
    done = run(*words, "prepare", "--dataset", "cifar10", env=environ)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "HOME" in done.stderr
    done = run(*words, "prepare", "--dataset", "folder:~/x", env=environ)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "~" in done.stderr


@as_root
def test_a_study_that_is_closed_to_writing() -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    subprocess.run(["chmod", "-R", "a-w", str(plan.paths.folder)], check=True)
    for words, code in ((["status", "s"], 0), (["collect", "s"], 2), (["plot", "s"], 2)):
        done = run(*POWERLESS, PYTHON, "-m", "jobkit", *words)
        assert done.returncode == code, done.stderr
        assert not code or (done.stderr.count("\n") == 1 and "cannot write" in done.stderr)


@as_root
def test_no_home_and_no_temporary_folder_that_can_be_written(tmp_path: Path) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    (tmp_path / "closed").mkdir(mode=0o555)
    closed = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(tmp_path / "closed"))
    for words in (["collect", "s"], ["plot", "s"]):
        done = run(*POWERLESS, PYTHON, "-m", "jobkit", *words, env={**os.environ, **closed})
        assert done.returncode == 0, done.stderr
    assert plan.paths.report.exists()


def test_a_limit_of_file_sizes_leaves_whole_files_only() -> None:
    """As a full disk does."""
    plan = whole_study("s", strategies=("ddp",), gpus=(1,), repeats=3)
    for words in ("collect", "plot"):
        jobkit(words, "s")
    folder = plan.paths.folder
    whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for limit in (1, 16):
        for path in list(whole)[::2]:
            if path.parent in (folder, folder / "figures") and path.name != "plan.json":
                path.unlink(missing_ok=True)
        for words in ("collect", "plot"):
            done = run("bash", "-c", f"ulimit -f {limit}; exec {PYTHON} -m jobkit {words} s")
            assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
            last = done.stderr.strip().splitlines()[-1:]
            assert done.returncode == 0 or last[0].startswith("jobkit: ")
        for path in (p for p in folder.rglob("*") if p.is_file()):
            # The former has what was read of runs that ended some seconds before.
            assert path == plan.paths.collected or path in whole, f"{path} was left over"
            if path.suffix in (".csv", ".png", ".svg"):
                assert path.read_bytes() == whole[path]


def test_few_open_files() -> None:
    whole_study("s", strategies=("ddp",), gpus=(1,), repeats=40)
    for words in ("status", "collect", "plot"):
        done = run("bash", "-c", f"ulimit -n 32; exec {PYTHON} -m jobkit {words} s")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("megabytes", [40, 200])
def test_little_memory_is_one_line(megabytes: int) -> None:
    whole_study("s", strategies=("ddp",), gpus=(1,))
    shell = f"ulimit -v {megabytes << 10}; exec {PYTHON} -m jobkit status s"
    done = run("bash", "-c", shell)
    assert done.returncode == 0 or "out of memory" in done.stderr, done.stderr


@pytest.mark.parametrize("umask", ["000", "077", "022"])
def test_no_umask_leaves_files_that_others_may_change(umask: str) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    subprocess.run(["chmod", "-R", "go-w", str(plan.paths.folder)], check=True)
    for words in ("collect", "plot") if umask == "000" else ("collect",):
        done = run("bash", "-c", f"umask {umask}; exec {PYTHON} -m jobkit {words} s")
        assert done.returncode == 0, done.stderr
    for path in plan.paths.folder.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss (iproute2)")
def test_a_local_training_listens_on_loopback_but_for_torchs_store(tmp_path: Path) -> None:
    words = f"--nproc-per-node 2 --run-dir {tmp_path}/run --strategy ddp --device cpu {SETTINGS}"
    words = words.replace("--epochs 1", "--epochs 100000")
    environ = {**os.environ, "JOBKIT_PYTHON": PYTHON}
    environ.pop("GLOO_SOCKET_IFNAME", None)
    job = subprocess.Popen(["bash", str(ROOT / "run.sh"), *words.split()], env=environ)
    metrics = StudyPaths(tmp_path).run("run").metrics(0)
    try:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and job.poll() is None:
            if metrics.exists() and '"kind":"epoch"' in metrics.read_text():
                break
            time.sleep(0.2)
        members = descendants(job.pid)
        found = run("ss", "-Hltnp").stdout.splitlines()
    finally:
        job.terminate()
        job.wait(100)
    own = [line for line in found if any(f"pid={pid}," in line for pid in members)]
    ranks = [line for line in own if "torch" not in line and "pt_elastic" not in line]
    assert len(ranks) >= 2, found
    assert all(re.search(r"\s127\.0\.0\.1:\d+\s", line) for line in ranks), ranks


def descendants(pid: int) -> set[int]:
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {p for child in task.read_text().split() for p in descendants(int(child))}
    return found
