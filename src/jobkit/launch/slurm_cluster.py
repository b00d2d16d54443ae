"""This machine's Slurm: the cluster's name and site, its commands, and whose a job is.

Each command has a time limit and an environment without an outer job's.
"""

import contextlib
import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch.command import clean_environment, python_path
from jobkit.launch.site import Site, site_of_cluster
from jobkit.outcome import slurm_jobs
from jobkit.outcome.slurm_jobs import CLUSTER, JOB_ID

TIMEOUT_S = 30.0
# sbatch repeats a call that a busy controller does not answer; ended too early, its job may stay.
SUBMIT_TIMEOUT_S = 300.0
_NOT_SET_UP = re.compile(r"configuration (source|file)|DNS SRV|unable to open|slurm\.conf", re.I)
_ARRAY = re.compile(r"^\s*MaxArraySize\s*=\s*([0-9]{1,9})\b", re.MULTILINE | re.IGNORECASE)
_MAX_ARRAY_SIZE = 1001  # Slurm's default


def find_site(name: str | None) -> Site | None:
    """The named site, else this cluster's; None: this machine, without Slurm.

    Raises UsageError where Slurm is here, is to say which cluster it is of, and does not answer.
    """
    here = shutil.which("sbatch") is not None
    if name == "local" or (name is None and not here):
        return None
    if name not in (None, "slurm"):
        return Site.load(name)
    cluster = CLUSTER.search(_configuration())
    if cluster is None and here:
        reason = slurm_jobs.silent.get("scontrol", "no answer")
        if not _NOT_SET_UP.search(reason):
            raise UsageError(f"{_no_answer(reason)}, or use --site local")
        if name is None:
            return None  # Slurm's commands are installed without a cluster
    return site_of_cluster(cluster[1] if cluster else "slurm")


def _no_answer(reason: str) -> str:
    return f"Slurm's controller does not answer ({reason}): try again later"


def max_array_size() -> int:
    """How many elements an array may have, by Slurm's configuration, else by its default."""
    size = _ARRAY.search(_configuration())
    return max(1, int(size[1])) if size else _MAX_ARRAY_SIZE


def _configuration() -> str:
    """Slurm's configuration: its file on this machine, else what the controller says of it."""
    conf = os.environ.get("SLURM_CONF")
    for path in [conf] if conf else ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"]:
        with contextlib.suppress(OSError):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            if CLUSTER.search(text):
                return text
    return slurm_jobs.output(["scontrol", "show", "config"]) or ""


def call(
    words: list[str], stdin: str = "", timeout_s: float = TIMEOUT_S
) -> "subprocess.CompletedProcess[str]":
    """The result of a Slurm command, without SBATCH_* and what an outer job set.

    Raises UsageError without Slurm, or without an answer in time.
    """
    env = clean_environment(os.environ)
    env |= {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS")}
    env |= {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}
    try:
        return subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env
        )
    except FileNotFoundError:
        text = f"no '{words[0]}' on PATH: this machine has no Slurm; use --site local"
    except subprocess.TimeoutExpired:
        text = f"Slurm did not answer '{words[0]}' within {timeout_s:.0f} s: look with squeue"
        text += ", then try again, or use --site local"
    raise UsageError(text)


def sbatch(text: str, options: Mapping[str, str | bool], test: bool = False) -> str:
    """The id of the job made from a script. Raises UsageError with the reason of a refusal.

    test: Slurm is only asked whether it would accept it.
    """
    words = ["sbatch", "--test-only" if test else "--parsable"]
    done = call(words, text, TIMEOUT_S if test else SUBMIT_TIMEOUT_S)
    if done.returncode:
        raise UsageError(refusal(done.stderr, options))
    return done.stdout.strip().split(";")[0]  # ID, or ID;CLUSTER


def refusal(stderr: str, options: Mapping[str, str | bool]) -> str:
    """sbatch's refusal in one line, with the valid names where it is about a name."""
    lines = [line for line in stderr.splitlines() if "error" in line or "failure" in line]
    reason = (lines or stderr.strip().splitlines() or ["no reason given"])[-1 if lines else 0]
    if re.search(r"Socket timed out|Unable to contact|Connection refused", reason):
        return _no_answer(reason)
    reason = reason.removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
    requested = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items())
    return f"sbatch rejected the job: {reason}{_valid_names(reason)} (requested: {requested})"


def _valid_names(reason: str) -> str:
    """ "; known partitions: a, b" where the reason is about one; otherwise empty."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the id has no name
        return ""
    managed = ["sacctmgr", "-n", "-P", "show"]
    for what, words in (
        ("accounts", [*managed, "assoc", f"user={user}", "format=account"]),
        ("partitions", ["sinfo", "-h", "-o", "%R"]),
        ("QOS", [*managed, "qos", "format=name"]),
    ):
        if "limit" not in reason and what.lower().removesuffix("s") in reason.lower():
            with contextlib.suppress(UsageError):  # the command is not there, or does not answer
                if names := set(re.split(r"[\s,]+", call(words).stdout)) - {""}:
                    return f"; known {what}: {', '.join(sorted(names))}"
            return ""
    return ""


# Whose a job is: job ids come from files that somebody else may have written.


def own_jobs(study: str, job_ids: Sequence[str], names: Collection[str]) -> list[str]:
    """Those of the jobs that Slurm knows, after it was asked whose they are.

    names: those that a job of the study may have. Raises UsageError for what is no job id, and
    where Slurm has a job of another user or of another name.
    """
    masters = ",".join(dict.fromkeys(_check_id(job_id).split("_")[0] for job_id in job_ids))
    done = call(["squeue", "-h", "-t", "all", "-j", masters, "-o", "%F|%U|%j"])
    if done.returncode and "Invalid job id" not in done.stderr:
        why = " ".join(done.stderr.split())
        raise UsageError(f"{study}: squeue failed, nothing was cancelled: {why}")
    known = set()
    for line in done.stdout.splitlines():
        job_id, uid, name = [*line.strip().split("|", 2), "", ""][:3]
        if uid != str(os.geteuid()) or name not in names:
            job = f"Slurm job {job_id} ('{name}' of user id {uid}) is no job of {study}"
            raise UsageError(f"{job}, though a file in its folder says so: nothing was cancelled")
        known.add(job_id)
    return [job_id for job_id in job_ids if job_id.split("_")[0] in known]


def _check_id(job_id: str) -> str:
    if not JOB_ID.fullmatch(job_id):  # a word of a file must not become scancel's option
        raise UsageError(f"{job_id!r} is no id of a Slurm job: nothing was cancelled")
    return job_id


def cancel(job_ids: Sequence[str]) -> None:
    """End the jobs, those that wait first, so that none starts in the meantime."""
    masters = [_check_id(job_id) for job_id in dict.fromkeys(job_ids)]
    if masters:  # a filter alone would end every job of the user that waits
        call(["scancel", "--state=PENDING", *masters])
        call(["scancel", *masters])
