"""Queries squeue and sacct, once for all jobs, and parses their output.

Either may be absent or silent: then less is known, and nothing fails.
"""

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace

TIMEOUT_S = 20.0
GONE = "GONE"  # not a word of Slurm's: it answers, and knows nothing of the job any more
JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")  # 17, or 17_0 of an array
SACCT = "JobID,State,ExitCode,Elapsed,NodeList"  # for read_sacct
silent: dict[str, str] = {}  # why a command gave no answer when it was last asked
CLUSTER = re.compile(r"^\s*ClusterName\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)

# What Slurm calls a state, and what jobkit calls it.
_STATES = {
    "pending": "PENDING REQUEUED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD CONFIGURING",
    "running": "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING",
    "ok": "COMPLETED",
    "failed": "FAILED",
    "oom": "OUT_OF_MEMORY",
    "timeout": "TIMEOUT DEADLINE",
    "preempted": "PREEMPTED",
    "cancelled": "CANCELLED REVOKED",
    "node_fail": "NODE_FAIL BOOT_FAIL",
}
STATUS = {state: status for status, states in _STATES.items() for state in states.split()}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Slurm's data on a job. Empty strings and None: not reported."""

    job_id: str
    state: str  # Slurm state, without "+" and "by UID"
    reason: str = ""  # why it waits
    exit_code: str = ""  # code:signal
    elapsed: str = ""
    node_list: str = ""

    @property
    def status(self) -> str:
        """One of jobkit's statuses; empty for a state that it does not know."""
        return STATUS.get(self.state, "")

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of its newest start, from D-HH:MM:SS or M:SS; None: not reported."""
        parts = zip(reversed(re.findall(r"\d+", self.elapsed)), (1, 60, 3600, 86400), strict=False)
        return sum(int(n) * unit_s for n, unit_s in parts) if self.elapsed[:1].isdigit() else None

    @property
    def line(self) -> str:
        """One line of evidence."""
        known = {"exit code": self.exit_code, "after": self.elapsed, "on": self.node_list}
        words = [f"{k} {v}" for k, v in {**known, "reason": self.reason}.items() if v]
        return ", ".join([f"Slurm job {self.job_id}: {self.state}", *words])


def ask(job_ids: Iterable[str], accounting: bool = True) -> dict[str, Job]:
    """Return Slurm's data on the jobs, by id (17 or 17_0); empty if Slurm does not answer.

    A job that it answered about and no longer knows has the state GONE. accounting: ask sacct
    too, which should not be done often.
    """
    wanted = sorted({i for i in job_ids if JOB_ID.fullmatch(i)})
    if not wanted:
        return {}
    masters = ",".join(sorted({job_id.split("_")[0] for job_id in wanted}))  # of arrays, once each
    queued = output(["squeue", "-h", "-r", "-t", "all", "-j", masters, "-o", "%i|%T|%M|%N|%r"])
    present, jobs = read_squeue(queued or ""), dict[str, Job]()
    if accounting:
        jobs = read_sacct(output(["sacct", "-X", "-P", "-n", "-j", masters, "-o", SACCT]) or "")
        known = {**jobs, **present}
        absent = [i for i in wanted if not _find(known, i)] if queued is not None else []
        jobs |= {i: Job(job_id=i, state=GONE) for i in absent}
    # squeue wins: what it shows is of this moment, sacct lags behind, but knows more.
    for job_id, job in present.items():
        recorded = jobs.get(job_id)
        same = recorded is not None and recorded.state == job.state
        jobs[job_id] = replace(recorded, reason=job.reason) if recorded and same else job
    return {i: row for i in wanted if (row := _find(jobs, i))}


def cluster() -> str | None:
    """The name of the cluster that ask() asks; None if Slurm does not answer."""
    name = CLUSTER.search(output(["scontrol", "show", "config"]) or "")
    return name[1] if name else None


def _find(jobs: dict[str, Job], job_id: str) -> Job | None:
    """The row of a job. Elements of an array that never started may have one row in common."""
    if job_id in jobs:
        return jobs[job_id]
    common = jobs.get(job_id.split("_")[0])
    return replace(common, job_id=job_id) if common else None


def output(command: list[str]) -> str | None:
    """What a command of Slurm prints; None where it is absent, fails or takes too long."""
    # What a user set for these commands by environment would hide jobs from us.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        silent[command[0]] = getattr(error, "strerror", None) or f"nothing within {TIMEOUT_S:.0f} s"
        return None
    if done.returncode == 0 or "Invalid job id" in done.stderr:  # an answer: it knows none of them
        silent.pop(command[0], None)
        return done.stdout
    silent[command[0]] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return None


def read_squeue(text: str) -> dict[str, Job]:
    """Read `squeue -o '%i|%T|%M|%N|%r'`."""
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) == 5:
            job_id, state, elapsed, nodes, reason = words
            reason = "" if reason == "None" else reason
            jobs[job_id] = Job(
                job_id=job_id, state=state, elapsed=elapsed, node_list=nodes, reason=reason
            )
    return jobs


def read_sacct(text: str) -> dict[str, Job]:
    """Read `sacct -X -P -n -o` of SACCT: the jobs' own rows. Of a job's starts the last counts."""
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        words = line.split("|")
        if len(words) == 5:
            job_id, state, exit_code, elapsed, nodes = words
            state, nodes = re.split(r"[ +]", state)[0], "" if nodes == "None assigned" else nodes
            job_id = job_id.split("_[")[0]  # 17_[2-5], what has not started: as 17, see _find
            jobs[job_id] = Job(
                job_id=job_id, state=state, exit_code=exit_code, elapsed=elapsed, node_list=nodes
            )
    return jobs
