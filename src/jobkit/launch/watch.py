"""`python -m jobkit status`: how far each run of a study is."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jobkit.errors import Exit, Parser, UsageError
from jobkit.launch.progress import duration, progress
from jobkit.launch.states import FINAL, States, states
from jobkit.paths import StudyPaths
from jobkit.plan import Plan
from jobkit.status import RunState
from jobkit.studies import find_study

EPILOG = """examples:
  python -m jobkit status                  the newest study
  python -m jobkit status demo --watch     again and again, until all runs have ended
  python -m jobkit status logs/demo --json
"""


def parser() -> argparse.ArgumentParser:
    """The command line of status."""
    made = Parser(
        prog="jobkit status",
        description="Show how far each run of a study is.",
        epilog=EPILOG,
    )
    made.add_argument("study", nargs="?", help="its name or folder (default: the newest)")
    made.add_argument("--watch", action="store_true", help="look again until all runs have ended")
    made.add_argument("--json", action="store_true", help="print one JSON object instead")
    made.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Show a study's state; 0 whatever the runs' states are, 2 for wrong usage."""
    args = parser().parse_args(argv)
    try:
        if not args.interval > 0:
            raise UsageError(f"--interval {args.interval}: must be more than 0")
        plan = Plan.read(StudyPaths(find_study(args.study)).plan)
    except UsageError as error:
        print(f"jobkit status: error: {error}", file=sys.stderr)
        return Exit.USAGE
    if args.json:
        print(json.dumps(as_json(plan, states(plan)), indent=1))
        return Exit.OK
    _show(plan, args)
    return Exit.OK


def _show(plan: Plan, args: argparse.Namespace) -> None:
    """Print the table once, or keep it up to date."""
    from rich.console import Console
    from rich.live import Live

    console, looking = Console(highlight=False), States(plan)
    found = looking.look()
    if not args.watch:
        console.print(_table(plan, found))
        return
    with Live(_table(plan, found), console=console, auto_refresh=False) as live:
        while any(state.status not in (*FINAL, "missing") for state in found.values()):
            time.sleep(args.interval)
            found = looking.look()
            live.update(_table(plan, found), refresh=True)


def rows(plan: Plan, found: dict[str, RunState]) -> list[dict[str, Any]]:
    """A row a run: its state, how far it is, and what is left."""
    made = []
    for run_id, spec in plan.runs.items():
        state = found[run_id]
        at = progress(plan.paths.run(run_id), spec, state.attempt)
        row = {"run_id": run_id, **asdict(state), "epoch": at.epoch, "epochs": at.epochs}
        row |= {"val_loss": at.val_loss, "val_accuracy": at.val_accuracy}
        running = state.status == "running"
        row |= {"elapsed_s": at.elapsed_s, "left_s": at.left_s if running else None}
        made.append(row)
    return made


def as_json(plan: Plan, found: dict[str, RunState]) -> dict[str, Any]:
    """The study's state for a program."""
    counts = Counter(state.status for state in found.values())
    return {"study": plan.study.name, "counts": dict(counts), "runs": rows(plan, found)}


def _table(plan: Plan, found: dict[str, RunState]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from jobkit.launch.view import style

    counts = Counter(state.status for state in found.values())
    said = ", ".join(f"{n} {status}" for status, n in counts.items())
    table = Table(
        title=f"{plan.study.name}: {len(found)} runs: {said}",
        box=None,
        padding=(0, 2, 0, 0),
        title_justify="left",
    )
    for heading in ("run", "status", "epoch", "loss", "left", "reason"):
        right = heading in ("epoch", "loss", "left")
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=heading != "reason",
            overflow="fold",
        )
    for row in rows(plan, found):
        loss = "" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
        table.add_row(
            row["run_id"],
            Text(row["status"], style=style(row["status"])),
            f"{row['epoch']}/{row['epochs']}",
            loss,
            duration(row["left_s"]),
            row["reason"] if row["status"] in FINAL else "",
        )
    return table
