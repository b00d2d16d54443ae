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
from jobkit.launch.follow.progress import duration, progress
from jobkit.launch.states import States
from jobkit.outcome.status import UNDER_WAY
from jobkit.paths import StudyPaths
from jobkit.spec.plan import Plan
from jobkit.spec.studies import find_study

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
    looking = States(plan)
    looking.look()
    if args.json:
        print(json.dumps(as_json(looking), indent=1))
    else:
        _show(looking, args)
    return Exit.OK


def _show(looking: States, args: argparse.Namespace) -> None:
    """Print the table once, or keep it up to date."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False)
    if not args.watch:
        console.print(_table(looking))
        return
    with Live(_table(looking), console=console, auto_refresh=False) as live:
        while any(state.status in UNDER_WAY for state in looking.found.values()):
            time.sleep(args.interval)
            looking.look()
            live.update(_table(looking), refresh=True)


def rows(looking: States) -> list[dict[str, Any]]:
    """A row a run: its state, how far it is, what is left, and what Slurm says of its job."""
    made = []
    for run_id, spec in looking.plan.runs.items():
        state, job = looking.found[run_id], looking.jobs.get(run_id)
        at = progress(looking.plan.paths.run(run_id), spec, state.attempt)
        row = {"run_id": run_id, **asdict(state), "epoch": at.epoch, "epochs": at.epochs}
        row |= {"val_loss": at.val_loss, "val_accuracy": at.val_accuracy}
        running = state.status == "running"
        row |= {"elapsed_s": at.elapsed_s, "left_s": at.left_s if running else None}
        for name in ("job_id", "state", "reason", "node_list"):
            row["job_id" if name == "job_id" else f"slurm_{name}"] = getattr(job, name, None)
        made.append(row)
    return made


def as_json(looking: States) -> dict[str, Any]:
    """The study's state for a program."""
    counts = Counter(state.status for state in looking.found.values())
    name = looking.plan.study.name
    return {"study": name, "counts": dict(counts), "runs": rows(looking)}


def _table(looking: States) -> Any:
    from rich.table import Table
    from rich.text import Text

    from jobkit.launch.follow.view import style

    counts = Counter(state.status for state in looking.found.values())
    said = ", ".join(f"{n} {status}" for status, n in counts.items())
    table = Table(
        title=f"{looking.plan.study.name}: {len(looking.found)} runs: {said}",
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
    for row in rows(looking):
        loss = "" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
        table.add_row(
            row["run_id"],
            Text(row["status"], style=style(row["status"])),
            f"{row['epoch']}/{row['epochs']}",
            loss,
            duration(row["left_s"]),
            row["reason"] if row["status"] != "ok" else "",
        )
    return table
