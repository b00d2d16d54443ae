"""`python -m jobkit status`: the state and progress of each run of a study."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jobkit.errors import Exit, Parser, command
from jobkit.launch.states import States
from jobkit.outcome.state import BAD_ENDS, UNDER_WAY
from jobkit.paths import short_path
from jobkit.spec.study import find_study, read_plan

MAX_SHOWN = 200  # runs in a table
INTERVAL_S = 2.0  # between two looks of --watch

EPILOG = """examples:
  python -m jobkit status                  the newest study
  python -m jobkit status demo --watch     update until all runs have ended
  python -m jobkit status logs/demo --json
  python -m jobkit status single           the jobs of run.sh alone

The rate is that of the table of results, the mean of the steps after the warm-up.
"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show a study's state; 0 whatever the states of its runs are."""
    options = Parser(
        prog="jobkit status",
        description="Show the state and progress of each run of a study; of more than "
        f"{MAX_SHOWN} runs at most so many: those at work, those that failed, those that wait.",
        epilog=EPILOG,
    )
    options.add_argument("study", nargs="?", help="its name or folder (default: the newest)")
    options.add_argument(
        "--watch",
        action="store_true",
        help="update until all runs have ended; a pipe gets the last table",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = options.parse_args(argv)
    looks = States(read_plan(find_study(args.study, planned=True)))
    looks.look()
    if args.json:
        counts = Counter(state.status for state in looks.of_runs.values())
        runs = [looks.row(run_id) for run_id in looks.plan.runs]
        found = {"study": looks.plan.study.name, "counts": counts, "runs": runs}
        print(json.dumps(found, indent=1))
    else:
        _show(looks, args.watch)
    return Exit.OK


def _show(looks: States, watch: bool) -> None:
    """Print the table once, or update it until all runs have ended.

    A pipe or a file gets it once, at the end.
    """
    from rich.console import Console  # --help needs no rich
    from rich.live import Live

    from jobkit.launch.view import study_view

    console = Console(highlight=False, markup=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and watch else None
    with live or contextlib.nullcontext():
        while True:
            listed, states = rows(looks), looks.of_runs.values()
            table = study_view(looks, listed, _notes(looks, len(listed)))
            goes_on = watch and any(state.status in UNDER_WAY for state in states)
            if live:
                live.update(table, refresh=True)
            elif not goes_on:
                console.print(table, soft_wrap=not console.is_terminal)
            if not goes_on:
                return
            time.sleep(INTERVAL_S)
            looks.look()


def _notes(looks: States, shown: int) -> list[str]:
    """What the table does not show, and the next command where nothing was started."""
    total, manifests, notes = len(looks.plan.runs), looks.plan.paths.folder / "kubernetes", []
    if looks.silence:
        what = f"note: Slurm did not answer ({looks.silence})"
        notes.append(f"{what}; states are from the runs' files")
    if total > shown:
        notes.append(f"{total - shown:,} of {total:,} runs are not listed here; --json has all")
    if manifests.is_dir() and all(s.status == "missing" for s in looks.of_runs.values()):
        notes.append(f"next: kubectl apply -f {short_path(manifests)}/")
    return notes


def rows(looks: States) -> list[dict[str, Any]]:
    """The rows of the table: all runs or, of many, those that a person should look at."""
    run_ids, order = list(looks.plan.runs), ("running", *BAD_ENDS, "pending")
    if len(run_ids) > MAX_SHOWN:
        status = {run_id: looks.of_runs[run_id].status for run_id in run_ids}
        listed = [run_id for run_id in run_ids if status[run_id] in order]
        run_ids = sorted(listed, key=lambda run_id: order.index(status[run_id]))[:MAX_SHOWN]
    return [looks.row(run_id) for run_id in run_ids]
