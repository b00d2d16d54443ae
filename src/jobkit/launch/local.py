"""Runs of a study on this machine: checks, the process that drives them, and its end.

`python -m jobkit.launch.local FOLDER` reads one JSON object on its standard input: what to run. It
can outlive the terminal, and ends what it started on TERM.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit import entry
from jobkit.errors import Exit, UsageError, command
from jobkit.files import append_to, locked
from jobkit.gpus import count_gpus
from jobkit.launch.command import (
    LaunchRequest,
    clean_environment,
    leave_spec,
    local_command,
    python_path,
)
from jobkit.launch.states import counted
from jobkit.paths import RunPaths, StudyPaths, read_json, write_json
from jobkit.processes import (
    END_SIGNALS,
    Children,
    Signals,
    adopt_orphans,
    end_descendants,
    end_process,
    identify,
    is_alive,
)
from jobkit.spec.command import CommandSpec
from jobkit.spec.dataset import absence
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan

_MODULE = "jobkit.launch.local"
GRACE_S = 20.0  # from TERM to KILL of what a run has left
LIMIT_S = 120.0  # run.sh ends its ranks itself, within --shutdown-timeout


# --- before a launch ------------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot run on this machine."""
    trainings = any(isinstance(spec, RunSpec) for spec in plan.runs.values())
    for package in ("torch", "torchvision") if trainings else ():
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{entry.missing(package)}; runs on this machine need it")
    for spec in plan.runs.values():
        if isinstance(spec, CommandSpec) and shutil.which(program := spec.command[0]) is None:
            hint = f": write python {program}" if program.endswith(".py") else ""
            raise UsageError(f"no command '{program}' on this machine{hint}")
        if spec.nodes > 1:
            other = f"--gpus {spec.world_size}, or run it on a cluster with Slurm"
            raise UsageError(f"{spec.nodes} nodes: this machine is one node; plan it with {other}")
    largest = max((s.world_size for s in plan.runs.values() if s.device == "cuda"), default=0)
    if largest and (gpus := count_gpus()) < largest:
        why = f"{largest} ranks need as many GPUs, and this machine shows {gpus}"
        look = "see nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES"
        raise UsageError(f"--device cuda: {why} ({look})")


def warnings(plan: Plan) -> list[str]:
    """Return warnings about oversubscribed cores or GPUs."""
    largest = max(spec.world_size for spec in plan.runs.values())
    cores, gpus = len(os.sched_getaffinity(0)), count_gpus()
    devices, texts = {spec.device for spec in plan.runs.values()}, []
    if 0 < gpus < largest and "auto" in devices:
        on_cpu = "runs with more ranks than GPUs compute on the CPU"
        texts.append(f"{counted(gpus, 'GPU')} for up to {largest} ranks: {on_cpu}")
    if largest > cores and (largest > gpus or "cpu" in devices):
        texts.append(f"up to {largest} ranks share {cores} cores: timings are not meaningful")
    option = "OMP_NUM_THREADS=" if plan.study.command else "--threads "  # of a program, of ours
    chosen = bool(plan.study.command and os.environ.get("OMP_NUM_THREADS"))
    free = (s for s in plan.runs.values() if not getattr(s, "threads", chosen))
    shares = {max(1, cores // spec.world_size) for spec in free}
    if (not gpus or "cpu" in devices) and len(shares) > 1:
        most, few = max(shares), min(shares)
        what = f"a rank has {most} threads at one size and {few} at another"
        texts.append(f"{what}: to compare equal ranks set {option}{few}")
    return texts


def prepare_data(plan: Plan, run_ids: Sequence[str]) -> None:
    """Prepare CIFAR-10 where this machine has none; UsageError where it cannot: no run could go."""
    specs = [s for s in map(plan.runs.__getitem__, run_ids) if isinstance(s, RunSpec)]
    for folder in {s.data_dir for s in specs if absence(s.dataset, s.data_dir)}:
        words = ["-m", "jobkit", "prepare", *(["--data-dir", folder] if folder else [])]
        env = {**os.environ, "PYTHONPATH": python_path()}
        done = subprocess.run([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = done.stderr.strip().split("\n")[-1].removeprefix("jobkit: error: ")
            raise UsageError(why or "the data were not prepared")


# --- one launcher for each study: the kernel frees its lock when the holder ends ------------------


@contextlib.contextmanager
def held(study: StudyPaths) -> Iterator[None]:
    """Hold the study's lock; raises UsageError while another launcher does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(study.launcher_lock, wait=False))
        except BlockingIOError:
            raise busy(study) from None
        except OSError as error:  # a link, or no file
            raise UsageError(f"{study.launcher_lock}: {error.strerror}: remove it") from None
        yield


def busy(study: StudyPaths) -> UsageError:
    """Return the error for a study that another launcher runs."""
    record, name = read_json(study.launcher) or {}, study.folder.name
    who = f"process {record['pid']} on {record.get('host')}" if "pid" in record else "another one"
    end = f"wait for it, or cancel it: python -m jobkit cancel {name}"
    return UsageError(f"{name} is being run by {who}: {end}")


# --- the process that drives the runs -------------------------------------------------------------


def drive(study: StudyPaths, order: Mapping[str, Any], signals: Signals) -> None:
    """Run the runs of the order in turn; return after the last one, or the one that was ended.

    order: of each run the line that starts it, and the process with which they end.
    """
    adopt_orphans()
    environ = {"JOBKIT_PYTHON": sys.executable, **clean_environment(os.environ)}
    environ["JOBKIT_LAUNCHER"] = "local"
    for run_id, line in order["runs"].items():
        paths, children, stopped = study.run(run_id), Children(LIMIT_S), False
        paths.folder.mkdir(parents=True, exist_ok=True)
        try:
            with append_to(paths.log) as log:
                children.start(line, environ, session=False, output=log)
        except OSError as error:
            print(f"{paths.log}: {error.strerror}", file=sys.stderr)
            _note_end(paths, Exit.FAILED)
            continue
        while not children.poll():
            end = any(signum in END_SIGNALS for signum in signals.wait(0.25))
            # The process that watches may have ended, with which the runs are to end.
            if end or order["parent"] not in (None, os.getppid()):
                stopped = True
                children.end()
        _note_end(paths, children.codes()[0])
        end_descendants(grace_s=GRACE_S)  # what a run leaked must not disturb the next one
        if stopped:
            return


def _note_end(paths: RunPaths, code: int | None) -> None:
    """Note how a run.sh ended that could not do so itself: it was killed, or began nothing."""
    job, key = read_json(paths.job) or {}, os.environ.get("JOBKIT_ORDER")
    if job.get("order") != key:
        job = {"v": 1, "launcher": "local", "host": socket.gethostname(), "order": key}
        job |= {"started": time.time(), "first_attempt": (paths.attempt_numbers() or [-1])[-1] + 1}
    if job.get("ended") is None:
        write_json(paths.job, {**job, "ended": time.time(), "exit_code": code})


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Read the order from standard input, acknowledge it, and run it."""
    study, order = StudyPaths(Path((argv or sys.argv)[-1])), json.load(sys.stdin)
    signals = Signals()
    # What starts a run leaves it in job.json: clocks may jump, so no time tells whose a run is.
    key = os.environ["JOBKIT_ORDER"] = secrets.token_hex(8)
    record = {"v": 1, **identify(os.getpid()), "started": time.time(), "key": key}
    with held(study):
        write_json(study.launcher, {**record, "run_ids": list(order["runs"])})
        print("taken", flush=True)
        # From here on the parent no longer reads this output: send it to the log.
        os.dup2(2, 1)
        try:
            drive(study, order, signals)
        finally:
            study.launcher.unlink(missing_ok=True)
    return Exit.OK


# --- start and end of that process ----------------------------------------------------------------


def start(plan: Plan, run_ids: Sequence[str], request: LaunchRequest) -> "subprocess.Popen[str]":
    """Start the process that runs the runs. Raises UsageError if that fails."""
    paths, runs = plan.paths, {}
    for run_id in run_ids:
        spec = plan.runs[run_id]
        runs[run_id] = local_command(spec, paths.run(run_id).folder, request.max_restarts)
        leave_spec(paths.run(run_id), spec)
    # The folder is for cancel: by these words a process is known as the study's.
    words = [sys.executable, "-P", "-m", _MODULE, str(paths.folder.resolve())]
    env = {**os.environ, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}
    with append_to(paths.launcher_log) as log:
        driver = subprocess.Popen(  # Ctrl-C reaches only the foreground process, which ends it
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
    assert driver.stdin and driver.stdout
    with driver.stdin as to_driver:
        json.dump({"runs": runs, "parent": None if request.detach else os.getpid()}, to_driver)
    if driver.stdout.readline().strip() != "taken":
        if driver.wait() == Exit.USAGE:  # another launcher came first
            raise busy(paths)
        raise UsageError(f"the runs could not be started: see {paths.launcher_log}")
    return driver


def cancel(paths: StudyPaths) -> bool:
    """End the launcher of a study from any process; whether there was one here to end.

    Raises UsageError where launcher.json names a process that is not shown to be that launcher:
    whoever wrote the file must not choose whom this user signals.
    """
    record, name = read_json(paths.launcher), paths.folder.name
    alive = is_alive(record)
    if not record or alive is False:
        return False
    if alive is None:
        where = f"{name} was started on {record.get('host')}, or in a container there"
        raise UsageError(f"{where}: cancel it there; if it is gone, remove {paths.launcher}")
    # By these last words of its command line a process is known as the study's launcher.
    words = [b"-m", _MODULE.encode(), os.fsencode(paths.folder.resolve())]
    if end_process(record["pid"], record.get("pid_start"), words):
        return True
    what = f"process {record['pid']}, which is not the launcher of {name}"
    raise UsageError(f"{paths.launcher} names {what}: nothing was ended; remove that file")


if __name__ == "__main__":
    sys.exit(main())
