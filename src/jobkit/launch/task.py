"""What a process of its own does for one run on this machine, or in one job, where submitit calls.

No descendant survives them: torchrun starts each worker in a new session, so that a signal to a
process group would not reach it. This process is therefore the kernel's subreaper of its
descendants, and ends those that are left.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import FrameType

from jobkit.errors import Exit
from jobkit.files import append_to
from jobkit.launch.command import clean_environment
from jobkit.launch.together import Watch
from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths, write_json
from jobkit.permissions import closed_to_others
from jobkit.processes import pid_namespace, process_start
from jobkit.requeue import MAX_RESTARTS, crashed
from jobkit.spec.runspec import RunSpec

# From SIGTERM to SIGKILL: a rank saves at the end of its iteration, or is ended by its watchdog.
GRACE_S = 20.0
_POLL_S = 0.05
ORDER_KEY = "JOBKIT_ORDER"  # names the launcher that starts a run, in its environment
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_one(folder: str, command: list[str], gpus: Mapping[str, str] | None = None) -> int:
    """Run the command on this machine with its output in the run's log; return its exit code.

    job.json names the process from the start, and records the exit code at the end. gpus: the
    variable that shows the run the GPUs that are its own.
    """
    environ = {**clean_environment(os.environ), **(gpus or {})}
    return _run(RunPaths(Path(folder)), command, environ, _Stop())


def run_in_job(folder: str, command: list[str]) -> int:
    """Run the command in the allocation of this Slurm job; return its exit code.

    Raises SystemExit with a code other than 0, so that the job fails too.
    """
    code = _run(RunPaths(Path(folder)), command, dict(os.environ), _Stop())
    if code:
        sys.exit(code)
    return code


def sweep_in_job(runs: list[tuple[str, list[str]]], max_restarts: int | None = None) -> int:
    """Run one command after the other in this allocation; return how many failed.

    A run that was stopped early requeues the job; completed runs are skipped then.
    """
    stop, bad = _Stop(), 0
    for folder, command in runs:
        paths = RunPaths(Path(folder))
        if stop.signum or (_restarts() and run_state(paths).status == "ok"):
            continue
        code = _run_again(paths, command, stop, max_restarts or 0)
        bad += code != Exit.OK
        if code == Exit.AGAIN and not stop.signum:
            limit = MAX_RESTARTS if max_restarts is None else max_restarts
            if _restarts() < limit:
                # Of an array's last element SLURM_JOB_ID is that of the whole array.
                subprocess.run(["scontrol", "requeue", slurm_job_id(os.environ) or ""])
            return bad
    return bad


def _run_again(paths: RunPaths, command: list[str], stop: "_Stop", restarts: int) -> int:
    """Run the command, again after a crash, at most so often; return its last exit code."""
    for left in range(restarts, -1, -1):
        code = _run(paths, command, dict(os.environ), stop)
        if stop.signum or not left or not crashed(code):
            break
    return code


def _restarts() -> int:
    """Return how often this job was requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def collect_in_job(command: list[str]) -> int:
    """Run a command with its output in the job's log; return its exit code."""
    # The display of the submitting session must not be used from the job.
    own = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return subprocess.run(command, env={**own, "JOBKIT_PYTHON": sys.executable}).returncode


@closed_to_others()
def _run(paths: RunPaths, command: list[str], environ: dict[str, str], stop: "_Stop") -> int:
    paths.folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    begun = time.monotonic()
    with append_to(paths.log) as log:
        job, process = _start(paths, command, environ, log)
        stop.follow(process, command)
        watch = Watch(paths.folder, environ) if _of_ranks(command) else None
        try:
            code = _wait(process, stop, watch)
        finally:
            end_descendants(grace_s=GRACE_S)
    took = round(time.monotonic() - begun, 3)  # the clock may have jumped
    end = {"ended": time.time(), "elapsed_s": took, "exit_code": code}
    write_json(paths.job, {**job, **end, "ranks_together": watch.found if watch else None})
    return code


def _of_ranks(command: list[str]) -> bool:
    """Whether run.sh starts the ranks of a user's command; with once the command does so itself."""
    options = command[: command.index("--")] if "--" in command else []
    return bool(options) and "once" not in options


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends (subreaper)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Stop:
    """Whether a signal requested the end of the run.

    Replaces submitit's handlers, which would end the job at a warning, or ignore the request.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._child: subprocess.Popen[bytes] | None = None
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._set)

    def _set(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum

    def follow(self, child: "subprocess.Popen[bytes]", command: list[str]) -> None:
        """Forward the stop signal to run.sh; ignore the other one of USR1 and USR2."""
        self._child = child
        for name in ("USR1", "USR2"):
            heard = name == _stop_signal(command)
            signal.signal(signal.Signals[f"SIG{name}"], self._warn if heard else _no_op)

    def _warn(self, signum: int, _frame: FrameType | None) -> None:
        if self._child:
            self._child.send_signal(signum)


def _stop_signal(command: list[str]) -> str:
    """Return the signal on which a run saves a checkpoint and ends, from its command line."""
    option = "--stop-signal"
    return command[command.index(option) + 1] if option in command else RunSpec().stop_signal


def _no_op(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: unlike this handler, SIG_IGN would be inherited by the children."""


def _start(
    paths: RunPaths, command: list[str], environ: dict[str, str], log: FileIO
) -> tuple[dict[str, object], "subprocess.Popen[bytes]"]:
    """Write job.json, then start the command; return the content of job.json and the process."""
    before, job_id = paths.attempt_numbers(), slurm_job_id(environ)
    job: dict[str, object] = {
        "v": 1,
        "launcher": "slurm" if job_id else "local",
        "job_id": job_id,
        "pid": os.getpid(),  # it lives until this file records the end
        "pid_start": process_start(os.getpid()),
        "pid_ns": pid_namespace(),
        "host": environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "started": time.time(),
        "order": environ.get(ORDER_KEY),
        "ended": None,
        "exit_code": None,
        "first_attempt": before[-1] + 1 if before else 0,
        "command": command,
    }
    write_json(paths.job, job)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**environ, "JOBKIT_PYTHON": environ.get("JOBKIT_PYTHON") or sys.executable},
    )
    # If this process is killed, the child continues: its pid is needed to end it.
    job["child"] = {"pid": process.pid, "pid_start": process_start(process.pid)}
    write_json(paths.job, job)
    return job, process


def slurm_job_id(environ: Mapping[str, str]) -> str | None:
    """Return the job's id as sacct shows it: 17, or 17_0 for an element of an array."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def _wait(process: "subprocess.Popen[bytes]", stop: _Stop, watch: Watch | None) -> int:
    """Wait for the process; forward a request to stop; return its exit code as a shell does."""
    deadline = float("inf")
    while (code := process.poll()) is None:
        if watch:
            watch.look()
        if stop.signum and deadline == float("inf"):
            process.terminate()
            deadline = time.monotonic() + GRACE_S
        elif time.monotonic() > deadline:
            process.kill()
        time.sleep(_POLL_S)
    return 128 - code if code < 0 else code


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in tasks.read_text().split()]
        except OSError:
            continue  # it has just ended
    return found


def descendants() -> list[int]:
    """Return the pids of all descendants of this process."""
    found, new = [], children_of(os.getpid())
    while new:
        found += new
        new = [child for pid in new for child in children_of(pid)]
    return found


def end_descendants(grace_s: float) -> None:
    """End all descendants of this process: SIGTERM, then, after the grace period, SIGKILL."""
    deadline, signalled = time.monotonic() + grace_s, set[int]()
    while pids := descendants():
        for pid in pids:
            late = time.monotonic() > deadline
            if late or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        _reap()
        time.sleep(_POLL_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":  # a run on this machine: its folder, its command and its GPUs
    sys.exit(run_one(*json.loads(sys.argv[1])))
