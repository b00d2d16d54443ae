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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobkit import entry
from jobkit.errors import Exit, UsageError
from jobkit.files import append_to, locked
from jobkit.gpus import count_gpus, lendable_gpus
from jobkit.launch.command import Order, clean_environment, leave_spec, local_command, python_path
from jobkit.launch.states import States
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
    is_own,
)
from jobkit.spec.runspec import PlannedRun
from jobkit.spec.study import Plan

_MODULE = "jobkit.launch.local"
GRACE_S = 20.0  # from TERM to KILL of what a run has left
ALL_GPUS = -1
LIMIT_S = 120.0  # run.sh ends its ranks itself, within --shutdown-timeout


# --- before a launch ------------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot run on this machine."""
    packages = [package for spec in plan.runs.values() for package in spec.packages]
    for package in dict.fromkeys(packages):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{entry.missing(package)}; runs on this machine need it")
    for spec in plan.runs.values():
        if spec.program is not None and shutil.which(spec.program) is None:
            hint = f": write python {spec.program}" if spec.program.endswith(".py") else ""
            raise UsageError(f"no command '{spec.program}' on this machine{hint}")
        if spec.nodes > 1:
            raise UsageError(
                f"{spec.nodes} nodes: this machine is one node; plan it with "
                f"--gpus {spec.world_size}, or run it on a cluster with Slurm"
            )
    sizes = [spec.world_size for spec in plan.runs.values() if spec.planned_device == "cuda"]
    if sizes and (gpus := count_gpus()) < max(sizes):
        raise UsageError(
            f"--device cuda: {max(sizes)} ranks need as many GPUs, and this machine shows {gpus} "
            "(see nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES)"
        )


def warnings(plan: Plan, at_once: int = 1) -> list[str]:
    """Return warnings about oversubscribed cores or GPUs; at_once: runs at work at a time."""
    largest = max(spec.world_size for spec in plan.runs.values())
    cores, gpus = len(os.sched_getaffinity(0)), count_gpus()
    devices = {spec.planned_device for spec in plan.runs.values()}
    texts = []
    if gpus and largest > gpus and "auto" in devices:
        texts.append(
            f"{gpus} GPU{'s' * (gpus > 1)} for up to {largest} ranks: runs with more ranks than "
            "GPUs compute on the CPU"
        )
    per_run = max(gpus_for(wanted_gpus(spec), gpus) for spec in plan.runs.values())
    at_once = min(at_once, len(plan.runs))
    if at_once > 1 and per_run and at_once * per_run > gpus:
        fit = gpus // per_run
        texts.append(
            f"--max-running {at_once}: each run has GPUs of its own, and {gpus} are enough for "
            f"{fit} run{'s' * (fit > 1)} of {per_run} at a time: others wait"
        )
    on_cpu = not gpus or largest > gpus or "cpu" in devices
    if on_cpu and largest > cores:
        texts.append(f"up to {largest} ranks share {cores} cores: timings are not meaningful")
    return texts


def refuse_orphans(study: StudyPaths) -> None:
    """Raise UsageError where a run of the folder is at work though its launcher was killed: one
    more run would be timed beside it. A run that is not of today's plan counts as well.
    """
    for path in sorted(study.folder.glob("*/job.json")):
        job = read_json(path)
        if not job or job.get("launcher") != "local" or job.get("ended") is not None:
            continue
        child = job.get("child")  # it goes on where run.sh was killed itself
        for record in (job, {**job, **child} if isinstance(child, Mapping) else {}):
            if is_alive(record) and is_own(record["pid"]):
                raise UsageError(
                    f"{path.parent.name} of {study.folder.name} still runs, as process "
                    f"{record['pid']}, though its launcher was killed: wait for its end, or end "
                    f"it: kill {record['pid']}"
                )


# --- one launcher for each study: the kernel frees its lock when the holder ends ------------------


@contextlib.contextmanager
def held(study: StudyPaths) -> Iterator[None]:
    """Hold the study's lock; raises UsageError while another launcher does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(study.launcher_lock, wait=False))
        except BlockingIOError:
            raise busy(study) from None
        except OSError as error:
            raise UsageError(f"{study.launcher_lock}: {error.strerror}: remove it") from None
        yield


def busy(study: StudyPaths) -> UsageError:
    """Return the error for a study that another launcher runs."""
    record, name = read_json(study.launcher) or {}, study.folder.name
    who = f"process {record['pid']} on {record.get('host')}" if "pid" in record else "another one"
    return UsageError(
        f"{name} is being run by {who}: wait for it, or cancel it: python -m jobkit cancel {name}"
    )


# --- GPUs of their own for runs that are at work at a time (--max-running) ------------------------


@dataclass
class Slots:
    """The GPUs that are not in use, and the variable that shows a run its own."""

    variable: str = ""  # empty: there is nothing to share out
    gpus: tuple[str, ...] = ()  # all of them, in order
    _used: set[str] = field(default_factory=set)

    @classmethod
    def for_runs(cls, wanted: Iterable[int], at_once: int, environ: Mapping[str, str]) -> "Slots":
        """Those of this machine; none where runs do not overlap, or all compute on the CPU.

        wanted: what wanted_gpus() says of each run.
        """
        if at_once == 1 or not any(wanted):
            return cls()
        variable, gpus = lendable_gpus(environ)
        return cls(variable, tuple(gpus))

    def take(self, wanted: int) -> dict[str, str] | None:
        """Take a run's GPUs: what its environment gets. None: too few of them are free now."""
        count = gpus_for(wanted, len(self.gpus))
        if not count:
            return {}
        free = [gpu for gpu in self.gpus if gpu not in self._used]
        if len(free) < count:
            return None
        self._used.update(free[:count])
        return {self.variable: ",".join(free[:count])}

    def free(self, taken: Mapping[str, str]) -> None:
        """Free what take() returned, as the run has ended."""
        self._used.difference_update(*(gpus.split(",") for gpus in taken.values()))


def wanted_gpus(run: PlannedRun) -> int:
    """How many GPUs a run gets: one for each rank; ALL_GPUS for dp."""
    if run.planned_device == "cpu":
        return 0
    return ALL_GPUS if run.whole_node else run.world_size


def gpus_for(wanted: int, there: int) -> int:
    """How many of the GPUs that are there a run gets that wants so many.

    With too few for its ranks a run of --device auto computes on the CPU, after a warning, which
    it can give only if it sees a GPU: it gets all there are, as a program that decides itself does.
    """
    return there if wanted == ALL_GPUS else min(wanted, there)


# --- the process that drives the runs -------------------------------------------------------------


def drive(order: Order, runs: Mapping[str, Any], signals: Signals) -> None:
    """Run the runs of the order; return when all have ended or a signal has requested the end.

    runs: of each run the line that starts it, and how many GPUs it wants.
    """
    study = StudyPaths(Path(order.folder))
    adopt_orphans()
    environ = clean_environment(os.environ)
    environ |= {"JOBKIT_LAUNCHER": "local"}
    environ.setdefault("JOBKIT_PYTHON", sys.executable)
    waiting, working = list(order.run_ids), dict[str, tuple[Children, dict[str, str]]]()
    slots = Slots.for_runs([run["gpus"] for run in runs.values()], order.at_once, environ)
    stopped = False
    while working or (waiting and not stopped):
        while waiting and not stopped and len(working) < order.at_once:
            gpus = slots.take(runs[waiting[0]]["gpus"])
            if gpus is None:  # in order: a later run with fewer ranks would delay this one
                break
            run_id = waiting.pop(0)
            paths = study.run(run_id)
            children = Children(LIMIT_S)
            paths.folder.mkdir(parents=True, exist_ok=True)
            try:
                with append_to(paths.log) as log:
                    children.start(
                        runs[run_id]["line"], {**environ, **gpus}, session=False, output=log
                    )
                working[run_id] = children, gpus
            except OSError as error:
                print(f"{paths.log}: {error.strerror}", file=sys.stderr)
                slots.free(gpus)
                _note_end(paths, Exit.FAILED)
        end = any(signum in END_SIGNALS for signum in signals.wait(0.25))
        # Whether the process that watches has ended, where the runs are to end with it.
        alone = order.parent is not None and os.getppid() != order.parent
        if not stopped and (alone or end):
            stopped = True
            for children, _ in working.values():
                children.end()
        for run_id, (children, gpus) in list(working.items()):
            if children.poll():
                del working[run_id]
                slots.free(gpus)
                _note_end(study.run(run_id), children.codes()[0])
        if not working:  # what a run leaked must not disturb the next one
            end_descendants(grace_s=GRACE_S)


def _note_end(paths: RunPaths, code: int | None) -> None:
    """Note how a run.sh ended that could not do so itself: it was killed, or began nothing."""
    job, key = read_json(paths.job) or {}, os.environ.get("JOBKIT_ORDER")
    if job.get("order") != key:
        job = {"v": 1, "launcher": "local", "host": socket.gethostname(), "order": key}
        job |= {"started": time.time(), "first_attempt": (paths.attempt_numbers() or [-1])[-1] + 1}
    if job.get("ended") is None:
        write_json(paths.job, {**job, "ended": time.time(), "exit_code": code})


def main() -> int:
    """Read the order from standard input, acknowledge it, and run it."""
    message = json.load(sys.stdin)
    order = Order(**message["order"])
    study, signals = StudyPaths(Path(order.folder)), Signals()
    # What starts a run leaves it in job.json: clocks may jump, and no time tells which launcher
    # a run belongs to.
    key = os.environ["JOBKIT_ORDER"] = secrets.token_hex(8)
    record = {"v": 1, **identify(os.getpid()), "started": time.time(), "key": key, **asdict(order)}
    try:
        with held(study):
            write_json(study.launcher, record)
            print("taken", flush=True)
            # From here on the parent no longer reads this output: send it to the log.
            os.dup2(2, 1)
            try:
                drive(order, message["runs"], signals)
            finally:
                study.launcher.unlink(missing_ok=True)
    except UsageError:
        print("busy", flush=True)
    return 0


# --- start and end of that process ----------------------------------------------------------------


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


def start(plan: Plan, order: Order) -> LocalRuns:
    """Start the process that runs the runs. Raises UsageError if another one does."""
    paths, runs = plan.paths, {}
    for run_id in order.run_ids:
        spec, folder = plan.runs[run_id], paths.run(run_id).folder
        line = local_command(spec, folder, order.more)
        runs[run_id] = {"line": line, "gpus": wanted_gpus(spec)}
        leave_spec(paths, run_id, spec)
    with append_to(paths.launcher_log) as log:
        driver = subprocess.Popen(
            # The folder is for cancel: by these words a process is known as the study's.
            [sys.executable, "-P", "-m", _MODULE, str(paths.folder.resolve())],
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
        json.dump({"order": asdict(order), "runs": runs}, to_driver)
    answer = driver.stdout.readline().strip()
    if answer == "busy":
        raise busy(paths)
    if answer != "taken":
        raise UsageError(f"the runs could not be started: see {paths.launcher_log}")
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
    name = paths.folder.name
    if alive is None and record.get("host") == socket.gethostname():
        raise UsageError(
            f"{name} was started in another container of this name: cancel it there; "
            f"if it is gone, remove {paths.launcher}"
        )
    if alive is None:
        raise UsageError(f"{name} runs on {record.get('host')}: cancel it there")
    # By these last words of its command line a process is known as the study's launcher.
    words = [b"-m", _MODULE.encode(), os.fsencode(paths.folder.resolve())]
    ended = False
    with contextlib.suppress(OSError):  # no signal can be sent safely
        ended = record.get("host") == socket.gethostname() and end_process(
            record["pid"],
            lambda start, line: start == record.get("pid_start") and line[-3:] == words,
        )
    if not ended:
        raise UsageError(
            f"{paths.launcher} names process {record['pid']}, which is not the launcher of "
            f"{name}: nothing was ended; remove that file"
        )
    return True


if __name__ == "__main__":
    sys.exit(main())
