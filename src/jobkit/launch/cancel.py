"""`python -m jobkit cancel`: end the runs of a study."""

import argparse
import sys
import time
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError
from jobkit.launch import local
from jobkit.launch.states import UNDER_WAY, States, job_ids, states
from jobkit.paths import StudyPaths
from jobkit.plan import Plan
from jobkit.studies import find_study

WAIT_S = 60.0


def parser() -> argparse.ArgumentParser:
    """The command line of cancel."""
    made = Parser(
        prog="jobkit cancel",
        description="End the runs of a study that are under way or wait.",
        epilog="example:\n  python -m jobkit cancel demo",
    )
    made.add_argument("study", nargs="?", help="its name or folder (default: the newest)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """End a study's runs; 0 also where there was nothing to end."""
    args = parser().parse_args(argv)
    try:
        paths = StudyPaths(find_study(args.study))
        ended = cancel_study(paths)
    except UsageError as error:
        print(f"jobkit cancel: error: {error}", file=sys.stderr)
        return Exit.USAGE
    name = paths.folder.name
    print(f"{name}: " + ("its runs were ended" if ended else "nothing was under way"))
    if ended:
        print(f"to go on, run it again; what became of each run: python -m jobkit status {name}")
    return Exit.OK


def cancel_study(paths: StudyPaths) -> bool:
    """End what is under way of a study, here and on Slurm; whether there was anything."""
    ended = local.cancel(paths)
    plan = Plan.read(paths.plan)
    jobs = job_ids(plan)
    if jobs and any(state.status in UNDER_WAY for state in states(plan).values()):
        from jobkit.launch import submit

        submit.cancel(jobs)
        _wait(plan)
        ended = True
    return ended


def _wait(plan: Plan) -> None:
    """Wait until Slurm says that the jobs have ended, but not for ever."""
    looking, deadline = States(plan, slurm_every_s=1.0), time.monotonic() + WAIT_S
    while any(state.status in UNDER_WAY for state in looking.look().values()):
        if time.monotonic() > deadline:
            raise UsageError(f"the jobs still end after {WAIT_S:.0f} s: look again with status")
        time.sleep(0.5)
