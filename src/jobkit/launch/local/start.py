"""Runs on this machine: checks, warnings, and the process that runs them."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobkit import entry
from jobkit.errors import UsageError
from jobkit.files import append_to
from jobkit.gpus import count_gpus
from jobkit.launch import lock
from jobkit.launch.command import Order, python_path
from jobkit.launch.local.slots import gpus_for
from jobkit.launch.states import States
from jobkit.paths import StudyPaths, read_json
from jobkit.processes import end_process, is_alive
from jobkit.spec.command import CommandSpec
from jobkit.spec.study import Plan

_DRIVER = "jobkit.launch.local.driver"


def check(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot run on this machine."""
    wanted = [package for spec in plan.runs.values() for package in spec.packages]
    for package in dict.fromkeys(wanted):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{entry.missing(package)}; runs on this machine need it")
    for spec in plan.runs.values():
        if spec.program is not None and shutil.which(spec.program) is None:
            raise UsageError(f"no command '{spec.program}' on this machine")
        if isinstance(spec, CommandSpec) and (script := spec.script) and not Path(script).exists():
            raise UsageError(
                f"{spec.program} {script}: no such file in {Path.cwd()}, in which the command runs"
            )
        if spec.nodes > 1:
            raise UsageError(
                f"{spec.nodes} nodes: this machine is one node; plan it with "
                f"--gpus {spec.world_size}, or run it on a cluster with Slurm"
            )
    on_gpus = max(
        (s.world_size for s in plan.runs.values() if s.planned_device == "cuda"), default=0
    )
    if on_gpus and (gpus := count_gpus()) < on_gpus:
        raise UsageError(
            f"--device cuda: {on_gpus} ranks need as many GPUs, and this machine shows {gpus} "
            "(see nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES)"
        )


def warnings(plan: Plan, at_once: int = 1) -> list[str]:
    """Return warnings about oversubscribed cores or GPUs; at_once: runs at work at a time."""
    largest = max(spec.world_size for spec in plan.runs.values())
    cores, gpus = len(os.sched_getaffinity(0)), count_gpus()
    wanted = {spec.planned_device for spec in plan.runs.values()}
    found = []
    if gpus and largest > gpus and "auto" in wanted:
        found.append(
            f"{gpus} GPU{'s' * (gpus > 1)} for up to {largest} ranks: runs with more ranks than "
            "GPUs compute on the CPU"
        )
    most = max(gpus_for(spec, gpus) for spec in plan.runs.values())
    at_once = min(at_once, len(plan.runs))
    if at_once > 1 and most and at_once * most > gpus:
        fit = gpus // most
        found.append(
            f"--max-running {at_once}: each run has GPUs of its own, and {gpus} are enough for "
            f"{fit} run{'s' * (fit > 1)} of {most} at a time: others wait"
        )
    on_cpu = not gpus or largest > gpus or "cpu" in wanted
    if on_cpu and largest > cores:
        found.append(f"up to {largest} ranks share {cores} cores: timings are not meaningful")
    return found


@dataclass(frozen=True)
class LocalRuns:
    """The process that runs the runs of a launch."""

    driver: "subprocess.Popen[str]"

    @property
    def where(self) -> str:
        """The process that runs them, for a message."""
        return f"process {self.driver.pid} on this machine"

    def running(self, states: States) -> bool:
        """Return whether the process is alive, whatever the runs' files say."""
        return self.driver.poll() is None

    def cancel(self) -> None:
        """End the process and its descendants, and wait for their end."""
        if self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()


def start(paths: StudyPaths, order: Order) -> LocalRuns:
    """Start the process that runs the runs. Raises UsageError if another one does."""
    with append_to(paths.launcher_log) as log:
        driver = subprocess.Popen(
            # The folder is for is_launcher: by these words a process is known as the study's.
            [sys.executable, "-P", "-m", _DRIVER, str(paths.folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C reaches only the foreground process, which ends the driver.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"},
        )
    assert driver.stdin and driver.stdout
    with driver.stdin as to_driver:
        json.dump(asdict(order), to_driver)
    answer = driver.stdout.readline().strip()
    if answer == "busy":
        raise lock.busy(paths)
    if answer != "taken":
        raise RuntimeError(f"the launcher did not start: see {paths.launcher_log}")
    return LocalRuns(driver)


def cancel(paths: StudyPaths) -> bool:
    """End the launcher of a study from any process; whether there was one here to end.

    Raises UsageError where launcher.json names a process that is not shown to be that launcher:
    whoever wrote the file must not choose whom this user signals.
    """
    record = read_json(paths.launcher)
    alive = is_alive(record)
    if not record or alive is False:
        return False
    if alive is None and record.get("host") == socket.gethostname():
        raise UsageError(
            f"{paths.folder.name} was started in another container of this name: cancel it there; "
            f"if it is gone, remove {paths.launcher}"
        )
    if alive is None:
        raise UsageError(f"{paths.folder.name} runs on {record.get('host')}: cancel it there")
    if record.get("host") != socket.gethostname() or not _end(record, paths):
        raise UsageError(
            f"{paths.launcher} names process {record['pid']}, which is not the launcher of "
            f"{paths.folder.name}: nothing was ended; remove that file"
        )
    return True


def _end(record: dict[str, Any], paths: StudyPaths) -> bool:
    """End a study's launcher and wait for its end; False, and no signal, where it is none."""
    try:
        return end_process(
            record["pid"],
            lambda start, words: start == record.get("pid_start") and is_launcher(words, paths),
        )
    except OSError:  # no signal can be sent safely
        return False


def is_launcher(command_line: list[bytes], paths: StudyPaths) -> bool:
    """Whether a process's command line is that of this study's launcher."""
    return command_line[-3:] == [b"-m", _DRIVER.encode(), os.fsencode(paths.folder.resolve())]
