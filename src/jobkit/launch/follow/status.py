"""`python -m jobkit status`: the state and progress of each run of a study."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobkit.entry import output_is_lost
from jobkit.errors import Exit, Parser, at_least, command, one_line
from jobkit.launch.follow.progress import duration, load, progress
from jobkit.launch.states import States
from jobkit.outcome.state import BAD_ENDS, UNDER_WAY
from jobkit.spec.study import find_study, is_of_logs, read_plan

MOST_SHOWN = 200  # runs in a table

EPILOG = """examples:
  python -m jobkit status                  the newest study
  python -m jobkit status demo --watch     update until all runs have ended
  python -m jobkit status logs/demo --json
  python -m jobkit status single           the jobs of run.sh alone
"""


def parser() -> argparse.ArgumentParser:
    """The command line of status."""
    made = Parser(
        prog="jobkit status",
        description="Show the state and progress of each run of a study; of more than "
        f"{MOST_SHOWN} runs at most so many: those at work, those that failed, those that wait.",
        epilog=EPILOG,
    )
    made.add_argument("study", nargs="?", help="its name or folder (default: the newest)")
    made.add_argument("--watch", action="store_true", help="update until all runs have ended")
    made.add_argument("--json", action="store_true", help="print one JSON object instead")
    made.add_argument(
        "--interval",
        type=at_least(float, 0.1),
        default=2.0,
        metavar="S",
        help="seconds between updates (default 2)",
    )
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Show a study's state; 0 whatever the states of its runs are."""
    args = parser().parse_args(argv)
    folder = find_study(args.study, planned=True)
    if is_of_logs(folder):
        return _nothing_runs(folder, args.json)
    states = States(read_plan(folder))
    states.look()
    if args.json:
        print(json.dumps(as_json(states), indent=1))
    else:
        _show(states, args)
    return Exit.OK


def _nothing_runs(folder: Path, as_object: bool) -> int:
    """Say that a folder has a list of logs and no run."""
    name = folder.resolve().name
    if as_object:
        print(json.dumps({"study": name, "counts": {}, "runs": []}, indent=1))
    else:
        print(one_line(f"{name}: logs that existed already (collect --logs): nothing runs there"))
    return Exit.OK


def _show(states: States, args: argparse.Namespace) -> None:
    """Print the table once, or update it until all runs have ended."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False)
    if not args.watch:
        console.print(_view(states, console))
        return
    if not console.is_terminal:
        _print_changes(states, console, args.interval)
        return
    with Live(_view(states, console), console=console, auto_refresh=False) as live:
        while any(state.status in UNDER_WAY for state in states.found.values()):
            time.sleep(args.interval)
            states.look()
            live.update(_view(states, console), refresh=True)


def _print_changes(states: States, console: Any, interval_s: float) -> None:
    """Print the table whenever the status or the epoch of a run changed: for a pipe or a file."""
    printed = None
    while not output_is_lost():
        now = [(r["run_id"], r["status"], r["epoch"]) for r in rows(states, shown(states))]
        if now != printed:
            console.print(_view(states, console))
            printed = now
        if not any(state.status in UNDER_WAY for state in states.found.values()):
            return
        time.sleep(interval_s)
        states.look()


def rows(states: States, run_ids: Iterable[str]) -> list[dict[str, Any]]:
    """One row per run: its state, its progress, the time left, and its job on Slurm."""
    made = []
    for run_id in run_ids:
        spec, state, job = states.plan.runs[run_id], states.found[run_id], states.jobs.get(run_id)
        at = progress(states.plan.paths.run(run_id), spec, state.attempt)
        row = {"run_id": run_id, **asdict(state), "epoch": at.epoch, "epochs": at.epochs}
        row |= {"val_loss": at.val_loss, "val_accuracy": at.val_accuracy}
        running = state.status == "running"
        row |= {"elapsed_s": at.elapsed_s, "left_s": at.left_s if running else None}
        row["load"] = load(states.plan.paths.run(run_id), state.attempt) if running else ""
        for name in ("job_id", "state", "reason", "node_list"):
            row["job_id" if name == "job_id" else f"slurm_{name}"] = getattr(job, name, None)
        made.append(row)
    return made


def as_json(states: States) -> dict[str, Any]:
    """The study's state for a program."""
    counts = Counter(state.status for state in states.found.values())
    name = states.plan.study.name
    return {"study": name, "counts": dict(counts), "runs": rows(states, states.plan.runs)}


def shown(states: States) -> list[str]:
    """The runs of the table: all of them or, of many, those that a person should look at."""
    found = states.plan.runs
    if len(found) <= MOST_SHOWN:
        return list(found)
    status_of = {run_id: states.found[run_id].status for run_id in found}
    order = ("running", *BAD_ENDS, "pending")
    listed = [run_id for run_id, status in status_of.items() if status in order]
    return sorted(listed, key=lambda run_id: order.index(status_of[run_id]))[:MOST_SHOWN]


def _left_out(states: States, count: int) -> str:
    """What the table of a large study says of the runs that are not in it."""
    total = len(states.plan.runs)
    if total == count:
        return ""
    return f"{total - count:,} of {total:,} runs are not listed here; --json has all"


def _view(states: States, console: Any) -> Any:
    """The table or, on a terminal too narrow for it, a few lines for each run, none cut."""
    from rich.console import Group
    from rich.text import Text

    read = rows(states, shown(states))
    more = _left_out(states, len(read))
    table = _table(states, read)
    room = console.options.update(width=10_000)  # else the answer is never above the width
    if console.measure(table, options=room).minimum <= console.width:
        return Group(table, Text(more, overflow="fold")) if more else table
    lines = [str(table.title)]
    for row in read:
        loss = "" if row["val_loss"] is None else f"loss {row['val_loss']:.3f}"
        left = f"{duration(row['left_s'])} left" if row["left_s"] is not None else ""
        said = (row["status"], _epochs(row), loss, left, row["load"])
        reason = row["reason"] if row["status"] != "ok" else ""
        lines += [row["run_id"], "  " + ", ".join(filter(None, (*said, reason)))]
    lines += filter(None, [more])
    return Text("\n".join(lines), overflow="fold")


def _epochs(row: Mapping[str, Any]) -> str:
    """The epochs done, of how many; empty for a command, which has none."""
    return f"{row['epoch']}/{row['epochs']}" if row["epochs"] else ""


def _table(states: States, read: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from jobkit.launch.follow.view import style

    counts = Counter(state.status for state in states.found.values())
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    total = len(states.found)
    table = Table(
        title=f"{states.plan.study.name}: {total} run{'s' * (total != 1)}: {summary}",
        box=None,
        padding=(0, 2, 0, 0),
        title_justify="left",
    )
    loads = ["load"] if any(row["load"] for row in read) else []
    for heading in ("run", "status", "epoch", "loss", "left", *loads, "reason"):
        right = heading in ("epoch", "loss", "left")
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=heading != "reason",
            overflow="fold",
        )
    for row in read:
        loss = "" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
        table.add_row(
            row["run_id"],
            Text(row["status"], style=style(row["status"])),
            _epochs(row),
            loss,
            duration(row["left_s"]),
            *(row[name] for name in loads),
            row["reason"] if row["status"] != "ok" else "",
        )
    return table
