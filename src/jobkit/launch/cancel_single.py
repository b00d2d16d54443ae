"""Ends one job of run.sh alone: what its folder's name, which run.sh gave it, says it is.

No launcher wrote down who runs it. A folder job-17 is that of Slurm job 17, and
run-20260102-030405-678 that of process 678, which then existed.
"""

import contextlib
import os
import re
import time
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch.slurm import commands
from jobkit.launch.slurm.own import check_id
from jobkit.paths import logs_root
from jobkit.processes import end_process, since_boot_s
from jobkit.spec.studies import is_run

_LATE_S = 2.0  # the folder's name has whole seconds, and is given after the process's start
_EARLY_S = 86_400.0  # several machines wait for each other before the name is given


def single_run(given: str | None) -> Path | None:
    """The folder of a job of run.sh, by its path or bare name; None where it is not one."""
    if not given:
        return None
    try:
        named = logs_root() / "single" / given
        folder = named if "/" not in given and is_run(named) else Path(given)
        is_one = folder.is_dir() and is_run(folder) and folder.absolute().parent.name == "single"
    except (OSError, ValueError):  # a name that no file can have; the caller says so of a study
        return None
    return folder if is_one else None


def cancel_single(folder: Path) -> str:
    """End the job of a folder; return what was done. Raises UsageError where that is not known."""
    name = folder.absolute().name
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"{folder} belongs to user id {owner}: only its owner ends its job")
    if found := re.fullmatch(r"job-([0-9]{1,12})", name):
        return _end_job(found[1])
    if found := re.fullmatch(r"run-([0-9]{8}-[0-9]{6})-([0-9]{1,9})", name):
        begun = None
        with contextlib.suppress(ValueError, OverflowError):  # no time of any day
            begun = time.mktime(time.strptime(found[1], "%Y%m%d-%H%M%S"))
        if begun is not None:
            return _end_process(int(found[2]), begun)
    raise UsageError(
        f"{name}: a folder that --run-dir named does not say whose it is; end its job with "
        "scancel, or with Ctrl-C where it was started"
    )


def _end_job(job_id: str) -> str:
    """Ask Slurm to end a job of this user's; an element of an array without the others."""
    done = commands.call(["squeue", "-h", "-j", check_id(job_id), "-o", "%A|%i|%U"])
    if done.returncode and "Invalid job id" not in done.stderr:
        why = " ".join(done.stderr.split())
        raise UsageError(f"job {job_id}: squeue failed, nothing was cancelled: {why}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    mine = [row[1:] for row in rows if row[0] == job_id and len(row) == 3]
    if not mine:
        return f"job {job_id}: Slurm has no such job that is running or pending"
    ((name, uid), *_) = mine
    if uid != str(os.geteuid()):
        raise UsageError(f"Slurm job {job_id} is of user id {uid}: nothing was cancelled")
    commands.cancel([name])
    return f"job {name}: Slurm was asked to end it"


def _end_process(pid: int, begun: float) -> str:
    """End run.sh, which hands it on to its ranks, and wait for its end."""

    def is_run_sh(start: int, words: list[bytes]) -> bool:
        late = time.time() - since_boot_s(start) - begun
        return -_EARLY_S <= late <= _LATE_S and any(
            word == b"run.sh" or word.endswith(b"/run.sh") for word in words
        )

    try:
        ended = end_process(pid, is_run_sh)
    except OSError as error:  # also process 0
        raise UsageError(
            f"process {pid} cannot be signalled safely ({error.strerror}): end it with Ctrl-C "
            "where it was started"
        ) from None
    said = "it was ended" if ended else "it is not running on this machine"
    return f"process {pid}: {said}"
