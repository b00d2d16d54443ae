"""`python -m jobkit cancel`: ends the runs of a study.

Ids come from files that somebody else may have written. A job is ended where Slurm says that it is
this user's and of the study's name; a process where start and words are of the study's launcher.
"""

import os
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.launch import local, slurm_cluster
from jobkit.launch.slurm_options import job_names
from jobkit.launch.states import States, wait_for_end
from jobkit.outcome.state import job_ids
from jobkit.paths import StudyPaths
from jobkit.permissions import check_study
from jobkit.spec.study import find_study, read_plan


@command
def main(argv: Sequence[str] | None = None) -> int:
    """End a study's runs; 0 also where none was running or pending."""
    options = Parser(
        prog="jobkit cancel",
        description="End the running and pending runs of a study.",
        epilog="example:\n  python -m jobkit cancel demo",
    )
    options.add_argument("study", help="its name or folder")
    paths = StudyPaths(find_study(options.parse_args(argv).study, planned=True))
    name = paths.folder.name
    if cancel_study(paths):
        print(f"{name}: its runs were ended")
        print(f"to continue, run it again; the state of each run: python -m jobkit status {name}")
    else:
        print(f"{name}: no run was running or pending")
    return Exit.OK


def cancel_study(paths: StudyPaths) -> bool:
    """End a study's runs, on this machine and on Slurm; return whether there were any.

    Raises UsageError, before anything is ended, if its files name what is not the study's.
    """
    if (owner := paths.folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"{paths.folder} belongs to user id {owner}: only its owner ends its runs")
    check_study(paths.folder)
    plan = read_plan(paths.folder)
    if not paths.plan.exists():
        raise UsageError(
            f"{paths.folder} has single jobs: end one with scancel JOBID, or with Ctrl-C where it "
            f"was started (python -m jobkit status {paths.folder.name} shows them)"
        )
    ended = local.cancel(paths)
    jobs = job_ids(map(plan.paths.run, plan.runs))
    if jobs and States(plan).under_way():
        slurm_cluster.cancel(slurm_cluster.own_jobs(plan.study.name, jobs, job_names(plan)))
        if not wait_for_end(plan):
            raise UsageError("the jobs have not ended yet: check again with status")
        ended = True
    return ended
