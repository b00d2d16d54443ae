"""`python -m jobkit cancel`: ends the runs of a study, or one job of run.sh alone."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.launch.cancel_single import cancel_single, single_run
from jobkit.launch.local import start
from jobkit.launch.states import states
from jobkit.outcome.state import UNDER_WAY, job_ids
from jobkit.paths import StudyPaths, logs_root, read_json
from jobkit.spec.study import Plan, find_study, is_of_logs, read_plan


def parser() -> argparse.ArgumentParser:
    """The command line of cancel."""
    made = Parser(
        prog="jobkit cancel",
        description="End the running and pending runs of a study, or one job of run.sh alone.",
        epilog="examples:\n  python -m jobkit cancel demo\n"
        "  python -m jobkit cancel job-17      the job whose folder is logs/single/job-17",
    )
    made.add_argument(
        "study", nargs="?", help="its name or folder, or that of a job (default: the newest study)"
    )
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """End a study's runs, or a single job; 0 also where none was running or pending."""
    args = parser().parse_args(argv)
    if (folder := single_run(args.study)) is not None:
        print(cancel_single(folder))
        return Exit.OK
    paths = StudyPaths(find_study(args.study, planned=True))
    ended = not is_of_logs(paths.folder) and cancel_study(paths)
    name = paths.folder.name
    none = "no run was running or pending"
    print(f"{name}: " + ("its runs were ended" if ended else none))
    if ended:
        print(f"to continue, run it again; the state of each run: python -m jobkit status {name}")
    return Exit.OK


def cancel_study(paths: StudyPaths) -> bool:
    """End a study's runs, on this machine and on Slurm; return whether there were any.

    Raises UsageError, before anything is ended, if its files name what is not the study's.
    """
    if (owner := paths.folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"{paths.folder} belongs to user id {owner}: only its owner ends its runs")
    plan = read_plan(paths.folder)
    if not paths.plan.exists():
        raise UsageError(_of_single_jobs(paths.folder, plan))
    ended = start.cancel(paths)
    jobs, found = job_ids(map(plan.paths.run, plan.runs)), states(plan)
    collector = (read_json(paths.collect_job) or {}).get("job_id")
    if jobs and any(state.status in UNDER_WAY for state in found.values()):
        from jobkit.launch.slurm import commands
        from jobkit.launch.slurm.jobs import wait_for_end
        from jobkit.launch.slurm.options import job_names
        from jobkit.launch.slurm.own import query, those_of

        wanted = [*jobs, *([str(collector)] if collector else [])]
        shown = commands.call(query(wanted)).stdout
        if ours := those_of(plan.study.name, job_names(plan), wanted, shown):
            commands.cancel(ours)
        if not wait_for_end(plan):
            raise UsageError("the jobs have not ended yet: check again with status")
        ended = True
    return ended


def _of_single_jobs(folder: Path, plan: Plan) -> str:
    """Which of the jobs of run.sh alone are to be named: they are no study's."""
    runs = [r for r, state in states(plan).items() if state.status in UNDER_WAY]
    if not runs:
        return f"{folder} has single jobs: none is running or pending"
    shown = ", ".join(runs[-5:])
    how = f"python -m jobkit cancel {folder}/{runs[-1]}"
    if folder.absolute() == (logs_root() / "single").absolute():
        how = f"python -m jobkit cancel {runs[-1]}"
    return f"{folder} has single jobs: name the one to end, as: {how} (under way: {shown})"
