"""Calls of Slurm's commands, each with a time limit and an environment without an outer job's."""

import getpass
import os
import re
import subprocess
from collections.abc import Sequence

from jobkit.errors import UsageError
from jobkit.launch.command import clean_environment, python_path
from jobkit.launch.slurm.options import Options
from jobkit.launch.slurm.own import check_id

TIMEOUT_S = 30.0
# sbatch repeats a call that a busy controller does not answer; ended too early, its job may stay.
SUBMIT_TIMEOUT_S = 300.0


def sbatch(text: str, options: Options) -> str:
    """The id of the job made from a script. Raises UsageError with the reason of a refusal."""
    done = call(["sbatch", "--parsable"], text, SUBMIT_TIMEOUT_S)
    if done.returncode:
        raise UsageError(refusal(done.stderr, options))
    return done.stdout.strip().split(";")[0]  # ID, or ID;CLUSTER


def check(text: str, options: Options) -> None:
    """Ask Slurm whether it would accept a script. Raises UsageError with its reason."""
    done = call(["sbatch", "--test-only"], text)
    if done.returncode:
        raise UsageError(refusal(done.stderr, options))


def cancel(job_ids: Sequence[str]) -> None:
    """End the jobs, those that wait first, so that none starts in the meantime.

    Raises UsageError for what is no job id: a word of a file must not become scancel's option.
    """
    masters = [check_id(job_id) for job_id in dict.fromkeys(job_ids)]
    if not masters:  # a filter alone would end every job of the user that waits
        return
    call(["scancel", "--state=PENDING", *masters])
    call(["scancel", *masters])


def call(
    words: list[str], stdin: str = "", timeout_s: float = TIMEOUT_S, **environ: str
) -> "subprocess.CompletedProcess[str]":
    """The result of a Slurm command. Raises UsageError without Slurm, or an answer in time."""
    try:
        return subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=slurm_environment() | environ,
        )
    except FileNotFoundError:
        raise UsageError(
            f"no '{words[0]}' on PATH: this machine has no Slurm; use --site local"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Slurm did not answer '{words[0]}' within {timeout_s:.0f} s: "
            "look with squeue, then try again"
        ) from None


def slurm_environment() -> dict[str, str]:
    """The environment for Slurm's commands, without SBATCH_* and what an outer job set."""
    kept = {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS")}
    own = {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}
    return {**clean_environment(os.environ), **kept, **own}


def refusal(stderr: str, options: Options) -> str:
    """sbatch's refusal in one line, with the valid names where it is about a name."""
    lines = [line for line in stderr.splitlines() if "error" in line or "failure" in line]
    reason = (lines or stderr.strip().splitlines() or ["no reason given"])[-1 if lines else 0]
    if re.search(r"Socket timed out|Unable to contact|Connection refused", reason):
        return f"Slurm's controller does not answer ({reason}): try again later"
    reason = reason.removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
    asked = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items())
    return f"sbatch rejected the job: {reason}{_valid_names(reason)} (requested: {asked})"


def user_name() -> str:
    """The user's name, or the number where the id has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _valid_names(reason: str) -> str:
    """The names that exist where the reason is about one; otherwise empty."""
    if "account" in reason.lower():
        user = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user_name()}"]
        return _listed([*user, "format=account"], "accounts")
    if "partition" in reason.lower():
        return _listed(["sinfo", "-h", "-o", "%R"], "partitions")
    if "qos" in reason.lower():
        return _listed(["sacctmgr", "-n", "-P", "show", "qos", "format=name"], "QOS")
    return ""


def _listed(words: list[str], what: str) -> str:
    """ "; known partitions: a, b", from the lines that a command prints; empty without any."""
    try:
        done = call(words)
    except UsageError:
        return ""
    names = sorted({name for line in done.stdout.split() for name in line.split(",") if name})
    return f"; known {what}: {', '.join(names)}" if names else ""
