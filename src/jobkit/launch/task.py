"""What a Slurm job of a study calls, through submitit: a run, or all runs in turn."""

import contextlib
import math
import os
import sys
import time
from pathlib import Path

from jobkit.errors import Exit
from jobkit.files import append_to
from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths
from jobkit.permissions import closed_to_others
from jobkit.processes import END_SIGNALS, Children, Signals

LIMIT_S = 60.0  # for run.sh to end its ranks; Slurm's KillWait is shorter


@closed_to_others()
def run_in_job(folder: str, command: list[str]) -> int:
    """Become the run in the allocation of this job, whose exit code is then the job's."""
    environ = _environment(Path(folder))
    with append_to(RunPaths(Path(folder)).log) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.execvpe(command[0], command, environ)


@closed_to_others()
def sweep_in_job(runs: list[tuple[str, list[str]]], limit_s: float = math.inf) -> int:
    """Run one command after the other in this allocation, all but the last within the limit.

    Returns how many failed.

    A run that was stopped early has requeued the job; completed runs are skipped then.
    """
    signals, bad = Signals(), 0
    requeued = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    for folder, command in runs:
        if requeued and run_state(RunPaths(Path(folder))).status == "ok":
            continue
        within_s = math.inf if folder == runs[-1][0] else limit_s
        code, stopped = _run(Path(folder), command, signals, within_s)
        bad += code != Exit.OK
        if stopped or code == Exit.AGAIN:
            break
    return bad


def _run(folder: Path, command: list[str], signals: Signals, limit_s: float) -> tuple[int, bool]:
    """Run one command; return its exit code, and whether a signal requested the end of all."""
    children, stopped = Children(LIMIT_S), False
    environ = _environment(folder)
    end_at = time.monotonic() + limit_s
    with append_to(RunPaths(folder).log) as log:
        children.start(command, environ, session=False, output=log)
        while not children.poll():
            if time.monotonic() > end_at:
                end_at, text = math.inf, f"CANCELLED AT {limit_s:.0f} s DUE TO TIME LIMIT of a run"
                children.end()
                with contextlib.suppress(OSError):  # a full disk
                    log.write(f"[jobkit] {text}\n".encode())
            for signum in signals.wait(0.25):
                if signum in END_SIGNALS:
                    stopped = True
                    children.end()
                else:
                    children.send(signum)
    return children.codes()[0] or 0, stopped


def _environment(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {"JOBKIT_PYTHON": sys.executable, **os.environ, "JOBKIT_LAUNCHER": "slurm"}
