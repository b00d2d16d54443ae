"""Which jobs are a study's: job ids come from files that somebody else may have written."""

import os
from collections.abc import Collection, Sequence

from jobkit.errors import UsageError
from jobkit.outcome.slurm_jobs import JOB_ID


def check_id(job_id: str) -> str:
    """Return the job id; raise UsageError for anything but 17 or 17_0."""
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no id of a Slurm job: nothing was cancelled")
    return job_id


def query(job_ids: Sequence[str]) -> list[str]:
    """The squeue command that says whose the jobs are: for those_of."""
    masters = ",".join(dict.fromkeys(check_id(job_id).split("_")[0] for job_id in job_ids))
    return ["squeue", "-h", "-t", "all", "-j", masters, "-o", "%F|%U|%j"]


def those_of(study: str, names: Collection[str], job_ids: Sequence[str], shown: str) -> list[str]:
    """The jobs that squeue's answer shows to be the study's and this user's.

    names: those that a job of the study may have. Raises UsageError where it has a job of another
    user or of another name.
    """
    known = set()
    for line in shown.splitlines():
        job_id, uid, name = [*line.strip().split("|", 2), "", ""][:3]
        if uid != str(os.geteuid()) or name not in names:
            raise UsageError(
                f"Slurm job {job_id} ('{name}' of user id {uid}) is no job of {study}, though a "
                "file in its folder says so: nothing was cancelled"
            )
        known.add(job_id)
    return [job_id for job_id in job_ids if job_id.split("_")[0] in known]
