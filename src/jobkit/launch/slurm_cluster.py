"""This machine's Slurm: the cluster's name and site, its commands, and whose a job is.

Each command has a time limit and an environment without an outer job's.
"""

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
from jobkit.outcome.slurm_jobs import CLUSTER, JOB_ID

TIMEOUT_S = 30.0
# sbatch repeats a call that a busy controller does not answer; ended too early, its job may stay.
SUBMIT_TIMEOUT_S = 300.0
_NOT_SET_UP = re.compile(r"configuration source|DNS SRV|Unable to open|slurm\.conf", re.IGNORECASE)
_ARRAY = re.compile(r"^\s*MaxArraySize\s*=\s*([0-9]{1,9})\b", re.MULTILINE | re.IGNORECASE)
_MAX_ARRAY_SIZE = 1001  # Slurm's default


def find_site(name: str | None, ask: bool = True) -> Site | None:
    """The named site, else this cluster's; None: this machine, without Slurm.

    ask: Slurm may be asked; a dry run reads its configuration file only. Raises UsageError
    where Slurm was requested and is absent, or is installed and does not answer.
    """
    if name == "local":
        return None
    here = shutil.which("sbatch") is not None
    if name is not None and ask and not here:
        raise UsageError(
            f"--site {name}: no 'sbatch' on PATH here; log in to the cluster, "
            "or use --site local for this machine"
        )
    if name not in (None, "slurm"):
        return Site.load(name)
    if name is None and not here:
        return None
    cluster = _configured(CLUSTER) or (cluster_name() if ask else None)
    if cluster is None and not ask and any(path.exists() for path in _configurations()):
        cluster = "slurm"  # only the controller knows its name
    if cluster is None and name is None:
        return None  # Slurm's commands are installed without a cluster
    if cluster is None and ask:
        raise UsageError(
            "--site slurm: Slurm is installed on this machine, but no cluster is configured"
        )
    return site_of_cluster(cluster or "slurm")


def max_array_size() -> int:
    """How many elements an array may have, by Slurm's configuration file, else by its default."""
    return max(1, int(_configured(_ARRAY) or _MAX_ARRAY_SIZE))


def _configurations() -> list[Path]:
    """Possible paths of Slurm's configuration on this machine."""
    if path := os.environ.get("SLURM_CONF"):
        return [Path(path)]
    return [Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf")]


def _configured(value: re.Pattern[str]) -> str | None:
    """What an expression matches first in Slurm's configuration files."""
    for path in _configurations():
        try:
            match = value.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return None


def cluster_name() -> str | None:
    """The cluster's name, as its controller says; None without a configured cluster.

    Raises UsageError where the controller does not answer.
    """
    if shutil.which("scontrol") is None:
        return None
    done = call(["scontrol", "show", "config"])
    if match := CLUSTER.search(done.stdout):
        return match[1]
    if _NOT_SET_UP.search(done.stderr):
        return None
    reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    raise UsageError(
        f"Slurm's controller does not answer ({reason}): try again later, or use --site local"
    )


def call(
    words: list[str], stdin: str = "", timeout_s: float = TIMEOUT_S, **environ: str
) -> "subprocess.CompletedProcess[str]":
    """The result of a Slurm command, without SBATCH_* and what an outer job set.

    Raises UsageError without Slurm, or without an answer in time.
    """
    env = clean_environment(os.environ)
    env |= {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS")}
    env |= {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1", **environ}
    try:
        return subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=env
        )
    except FileNotFoundError:
        raise UsageError(
            f"no '{words[0]}' on PATH: this machine has no Slurm; use --site local"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Slurm did not answer '{words[0]}' within {timeout_s:.0f} s: look with squeue, then "
            "try again, or use --site local"
        ) from None


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
        return f"Slurm's controller does not answer ({reason}): try again later"
    reason = reason.removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
    requested = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items())
    return f"sbatch rejected the job: {reason}{_valid_names(reason)} (requested: {requested})"


def _valid_names(reason: str) -> str:
    """ "; known partitions: a, b" where the reason is about one; otherwise empty."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the id has no name
        user = str(os.geteuid())
    accounts = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account"]
    for word, what, command in (
        ("account", "accounts", accounts),
        ("partition", "partitions", ["sinfo", "-h", "-o", "%R"]),
        ("qos", "QOS", ["sacctmgr", "-n", "-P", "show", "qos", "format=name"]),
    ):
        if word not in reason.lower():
            continue
        try:
            shown = call(command).stdout
        except UsageError:
            return ""
        names = sorted({name for line in shown.split() for name in line.split(",") if name})
        return f"; known {what}: {', '.join(names)}" if names else ""
    return ""


# Whose a job is: job ids come from files that somebody else may have written.


def check_id(job_id: str) -> str:
    """Return the job id; raise UsageError for anything but 17 or 17_0."""
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no id of a Slurm job: nothing was cancelled")
    return job_id


def jobs_of_study(study: str, names: Collection[str], job_ids: Sequence[str]) -> list[str]:
    """Those of the jobs that squeue shows to be the study's and this user's.

    names: those that a job of the study may have. Raises UsageError where it has a job of another
    user or of another name.
    """
    masters = ",".join(dict.fromkeys(check_id(job_id).split("_")[0] for job_id in job_ids))
    known = set()
    words = ["squeue", "-h", "-t", "all", "-j", masters, "-o", "%F|%U|%j"]
    for line in call(words).stdout.splitlines():
        job_id, uid, name = [*line.strip().split("|", 2), "", ""][:3]
        if uid != str(os.geteuid()) or name not in names:
            raise UsageError(
                f"Slurm job {job_id} ('{name}' of user id {uid}) is no job of {study}, though a "
                "file in its folder says so: nothing was cancelled"
            )
        known.add(job_id)
    return [job_id for job_id in job_ids if job_id.split("_")[0] in known]


def cancel(job_ids: Sequence[str]) -> None:
    """End the jobs, those that wait first, so that none starts in the meantime.

    Raises UsageError for what is no job id: a word of a file must not become scancel's option.
    """
    masters = [check_id(job_id) for job_id in dict.fromkeys(job_ids)]
    if not masters:  # a filter alone would end every job of the user that waits
        return
    call(["scancel", "--state=PENDING", *masters])
    call(["scancel", *masters])
