"""Runs a plan on this machine, a few runs at a time, in a separate process.

`python -m jobkit.launch.local.driver` reads one JSON object on its standard input: what to run.
It can outlive the terminal, if requested, and ends what it started on SIGTERM.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch import lock
from jobkit.launch.command import Order, clean_environment, leave_spec, local_command
from jobkit.launch.local.slots import Slots
from jobkit.launch.task import GRACE_S, ORDER_KEY, adopt_orphans, end_descendants
from jobkit.paths import StudyPaths, write_json
from jobkit.processes import pid_namespace, process_start
from jobkit.spec.study import Plan

_POLL_S = 0.1
_Process = subprocess.Popen[bytes]


def drive(order: Order) -> None:
    """Run the runs of the order; return when all have ended or a signal has requested the end."""
    study = StudyPaths(Path(order.folder))
    runs = Plan.read(study.plan).runs
    adopt_orphans()
    waiting, working = list(order.run_ids), dict[_Process, dict[str, str]]()
    ordered = [runs[run_id] for run_id in waiting]
    slots = Slots.for_runs(ordered, order.at_once, clean_environment(os.environ))
    with _stop_requested(order.parent) as stopped:
        while (waiting or working) and not stopped():
            while waiting and len(working) < order.at_once:
                gpus = slots.lend(runs[waiting[0]])
                if gpus is None:  # in order: a later run with fewer ranks would delay this one
                    break
                run_id = waiting.pop(0)
                folder = study.run(run_id).folder
                command = local_command(runs[run_id], folder, order.more)
                leave_spec(study, run_id, runs[run_id])
                working[_start(folder, command, gpus)] = gpus
            time.sleep(_POLL_S)
            for process in [process for process in working if process.poll() is not None]:
                slots.take_back(working.pop(process))
            if not working:  # processes that a killed task leaked must not disturb the next run
                end_descendants(grace_s=GRACE_S)
        _end(list(working))


def _start(folder: Path, command: list[str], gpus: dict[str, str]) -> _Process:
    """Start the process of one run, which writes job.json."""
    words = [sys.executable, "-P", "-m", "jobkit.launch.task"]
    return subprocess.Popen([*words, json.dumps([str(folder), command, gpus])])


def _end(processes: list[_Process]) -> None:
    """End the runs with SIGTERM: each ends its ranks, and notes it."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
    end_descendants(grace_s=GRACE_S)


@contextlib.contextmanager
def _stop_requested(parent: int | None) -> Iterator[Callable[[], bool]]:
    """Yield a function: whether SIGTERM or SIGINT has arrived, or the parent has ended."""
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: signals.append(number))
    yield lambda: bool(signals) or (parent is not None and os.getppid() != parent)


@contextlib.contextmanager
def announced(order: Order) -> Iterator[None]:
    """Hold the study's lock and name this process in launcher.json; UsageError if it is held."""
    study = StudyPaths(Path(order.folder))
    record = {
        "v": 1,
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "pid_ns": pid_namespace(),
        "host": socket.gethostname(),
        "started": time.time(),
        # What starts a run leaves it in job.json: clocks may jump, and no time tells which
        # launcher a run is of.
        "key": secrets.token_hex(8),
        **asdict(order),
    }
    os.environ[ORDER_KEY] = str(record["key"])
    with lock.held(study):
        write_json(study.launcher, record)
        try:
            yield
        finally:
            study.launcher.unlink(missing_ok=True)


def main() -> int:
    """Read the order from standard input, acknowledge it, and run it."""
    order = Order(**json.load(sys.stdin))
    try:
        with announced(order):
            print("taken", flush=True)
            # From here on the parent no longer reads this output: send it to the log.
            os.dup2(2, 1)
            drive(order)
    except UsageError:
        print("busy", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
