"""Ends one job of run.sh alone: its newest start, which run.sh noted in the folder's job.json.

Slurm job 17 is that of a folder, if run.sh noted there the submit time, name and folder that Slurm
says of job 17 now.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.launch.slurm import commands
from jobkit.launch.slurm.own import check_id
from jobkit.paths import RunPaths, logs_root, read_json
from jobkit.processes import end_process, is_alive, is_at_work
from jobkit.spec.study import is_run


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
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"{folder} belongs to user id {owner}: only its owner ends its job")
    noted = read_json(RunPaths(folder).job) or {}
    if noted.get("launcher") == "run.sh" and (said := _end_newest(folder, noted)):
        return said
    raise UsageError(
        f"{folder.absolute().name}: its folder does not say whose it is; end its job with scancel, "
        "or with Ctrl-C where it was started"
    )


def _end_newest(folder: Path, noted: Mapping[str, Any]) -> str:
    """End the start that job.json tells of, which may have resumed the run; empty if of none."""
    job_id, pid, host = noted.get("job_id"), noted.get("pid"), noted.get("host")
    if isinstance(job_id, str) and re.fullmatch(r"[0-9]{1,12}(_[0-9]{1,12})?", job_id):
        if noted.get("shared") is True and folder.absolute().name != f"job-{job_id}":
            raise UsageError(
                f"{folder.name} was resumed inside Slurm job {job_id}, which may do other work "
                f"too: nothing was cancelled; to end all of it: scancel {job_id}"
            )
        return _end_job(folder, job_id)
    if type(pid) is not int or pid <= 0:
        return ""
    if is_alive(noted) is None:
        raise UsageError(f"{folder.name} was started on {host}, as process {pid}: end it there")
    _refuse_orphans(folder, noted)
    return _end_process(pid, noted.get("pid_start"))


def _refuse_orphans(folder: Path, noted: Mapping[str, Any]) -> None:
    """Raise UsageError where run.sh was killed, but not what it started: that is not signalled."""
    child = noted.get("child")
    if is_alive(noted) is False and isinstance(child, Mapping) and is_at_work(noted):
        raise UsageError(
            f"{folder.name}: its run.sh was killed, and its ranks go on under process "
            f"{child.get('pid')} on this machine: end them with: kill {child.get('pid')}"
        )


def _end_job(folder: Path, job_id: str) -> str:
    """Ask Slurm to end a job of this user's; an element of an array without the others."""
    rows = [row for row in _queued(job_id) if job_id in row[:2] and len(row) == 4]
    if not rows:
        return f"job {job_id}: Slurm has no such job that is running or pending"
    _, name, uid, says = rows[0]
    if uid != str(os.geteuid()):
        raise UsageError(f"Slurm job {job_id} is of user id {uid}: nothing was cancelled")
    if not _is_of(folder, name, says):
        raise UsageError(
            f"Slurm job {name} ({says.replace('|', ', ')}) is not known to be that of {folder}, "
            f"which may be another cluster's: nothing was cancelled; if it is: scancel {name}"
        )
    commands.cancel([name])
    return f"job {name}: Slurm was asked to end it"


def _queued(job_id: str) -> list[list[str]]:
    """Jobs of this number: number, name of an array's element, user, and the rest in one text."""
    words = ["squeue", "-h", "-j", check_id(job_id), "-o", "%A|%i|%U|%V|%j|%Z"]
    done = commands.call(words, TZ="UTC0", SLURM_TIME_FORMAT="standard")  # as run.sh asked
    if done.returncode and "Invalid job id" not in done.stderr:
        why = " ".join(done.stderr.split())
        raise UsageError(f"job {job_id}: squeue failed, nothing was cancelled: {why}")
    return [line.split("|", 3) for line in done.stdout.splitlines()]


def _is_of(folder: Path, name: str, says: str) -> bool:
    """Whether Slurm says of a job what run.sh noted in the folder; a requeue is a new submit."""
    noted = ""
    with contextlib.suppress(OSError, ValueError):
        noted = "".join(read_text(RunPaths(folder).attempts / "first").splitlines()[1:2])
    if noted == says:
        return True
    if noted.partition("|")[2] != says.partition("|")[2] or noted > says:
        return False
    shown = commands.call(["scontrol", "-o", "show", "job", check_id(name)]).stdout
    return re.search(r" Restarts=[1-9]", shown) is not None


def _end_process(pid: int, began: object) -> str:
    """End run.sh, which hands it on to its ranks, and wait for its end.

    began: when the process that is meant began, in ticks since the boot.
    """

    def is_run_sh(start: int, words: list[bytes]) -> bool:
        return start == began and any(w == b"run.sh" or w.endswith(b"/run.sh") for w in words)

    try:
        ended = end_process(pid, is_run_sh)
    except OSError as error:
        raise UsageError(
            f"process {pid} cannot be signalled safely ({error.strerror}): end it with Ctrl-C "
            "where it was started"
        ) from None
    said = "it was ended" if ended else "it is not running on this machine"
    return f"process {pid}: {said}"
