"""`python -m jobkit status`: the state and progress of each run of a study."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jobkit.entry import output_is_lost
from jobkit.errors import Exit, Parser, at_least, command, one_line
from jobkit.launch.states import States
from jobkit.outcome.state import BAD_ENDS, UNDER_WAY
from jobkit.spec.study import find_study, is_of_logs, read_plan

MAX_SHOWN = 200  # runs in a table

EPILOG = """examples:
  python -m jobkit status                  the newest study
  python -m jobkit status demo --watch     update until all runs have ended
  python -m jobkit status logs/demo --json
  python -m jobkit status single           the jobs of run.sh alone

The rate is that of the table of results: images/s is the median of the epochs after the first one,
of other programs the mean of the steps after the warm-up.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of status."""
    options = Parser(
        prog="jobkit status",
        description="Show the state and progress of each run of a study; of more than "
        f"{MAX_SHOWN} runs at most so many: those at work, those that failed, those that wait.",
        epilog=EPILOG,
    )
    options.add_argument("study", nargs="?", help="its name or folder (default: the newest)")
    options.add_argument("--watch", action="store_true", help="update until all runs have ended")
    options.add_argument("--json", action="store_true", help="print one JSON object instead")
    options.add_argument(
        "--interval",
        type=at_least(float, 0.1),
        default=2.0,
        metavar="S",
        help="seconds between updates (default 2)",
    )
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show a study's state; 0 whatever the states of its runs are."""
    args = parser().parse_args(argv)
    folder = find_study(args.study, planned=True)
    if is_of_logs(folder):  # it has a list of logs and no run
        name = folder.resolve().name
        text = f"{name}: logs that existed already (collect --logs): nothing runs there"
        nothing = json.dumps({"study": name, "counts": {}, "runs": []}, indent=1)
        print(nothing if args.json else one_line(text))
        return Exit.OK
    looks = States(read_plan(folder))
    looks.look()
    if args.json:
        print(json.dumps(as_json(looks), indent=1))
    else:
        _show(looks, args)
    return Exit.OK


def _show(looks: States, args: argparse.Namespace) -> None:
    """Print the table once, or update it until all runs have ended."""
    from rich.console import Console  # --help needs no rich
    from rich.live import Live

    from jobkit.launch.view import study_view

    console = Console(highlight=False, markup=False)
    draw = lambda: study_view(looks, rows(looks), console)  # noqa: E731
    if not args.watch:
        console.print(draw())
    elif console.is_terminal:
        with Live(draw(), console=console, auto_refresh=False) as live:
            while any(state.status in UNDER_WAY for state in looks.of_runs.values()):
                time.sleep(args.interval)
                looks.look()
                live.update(draw(), refresh=True)
    else:
        _print_changes(looks, lambda: console.print(draw()), args.interval)


def _print_changes(looks: States, show: Callable[[], None], interval_s: float) -> None:
    """Show the table whenever the status or the epoch of a run changed: for a pipe or a file."""
    printed = None
    while not output_is_lost():
        now = [(r["run_id"], r["status"], r["epoch"]) for r in rows(looks)]
        if now != printed:
            show()
            printed = now
        if not any(state.status in UNDER_WAY for state in looks.of_runs.values()):
            return
        time.sleep(interval_s)
        looks.look()


def as_json(looks: States) -> dict[str, Any]:
    """The study's state for a program."""
    counts = Counter(state.status for state in looks.of_runs.values())
    runs = [looks.row(run_id) for run_id in looks.plan.runs]
    return {"study": looks.plan.study.name, "counts": dict(counts), "runs": runs}


def rows(looks: States) -> list[dict[str, Any]]:
    """The rows of the table: all runs or, of many, those that a person should look at."""
    run_ids, order = list(looks.plan.runs), ("running", *BAD_ENDS, "pending")
    if len(run_ids) > MAX_SHOWN:
        status = {run_id: looks.of_runs[run_id].status for run_id in run_ids}
        listed = [run_id for run_id in run_ids if status[run_id] in order]
        run_ids = sorted(listed, key=lambda run_id: order.index(status[run_id]))[:MAX_SHOWN]
    return [looks.row(run_id) for run_id in run_ids]
