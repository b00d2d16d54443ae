"""`python run_benchmarks.py`: expand a study, run what is missing, show how it goes."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, UsageError
from jobkit.plan import STUDIES, Plan, Study
from jobkit.spec import add_spec_arguments, given_settings

if TYPE_CHECKING:  # so that --help imports neither rich nor submitit
    from rich.console import Console

    from jobkit.launch.launcher import Launch
    from jobkit.status import RunState

DEFAULT_STUDY = "strong"
EPILOG = """examples:
  python run_benchmarks.py --study demo                        a first look, on any machine
  python run_benchmarks.py --study strong --dry-run            print each command, write nothing
  python run_benchmarks.py --strategies ddp fsdp --gpus 1 2 --repeats 3 --epochs 3
  python run_benchmarks.py --study my.toml --name wide --width 4 --precision bf16

Run the same command again: only runs that are missing or failed are started.
Exit codes: 0 all runs are ok, 1 a run is not, 2 wrong usage, 130 and 143 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of run_benchmarks.py."""
    made = argparse.ArgumentParser(
        prog="run_benchmarks.py",
        description="Run a study: the same training under several strategies and sizes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.toml")))
    study = made.add_argument_group("the study")
    study.add_argument(
        "--study",
        default=DEFAULT_STUDY,
        metavar="FILE",
        help=f"a TOML file, or one of: {known} (default {DEFAULT_STUDY})",
    )
    study.add_argument("--name", help="name of its folder under logs/ (default: the study's)")
    study.add_argument("--strategies", nargs="+", metavar="NAME", help="strategies to compare")
    study.add_argument(
        "--gpus",
        nargs="+",
        metavar="N",
        help="sizes: ranks in all (one a GPU; processes where there is none), or NODESxRANKS",
    )
    study.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks that fill a node")
    study.add_argument("--repeats", type=int, metavar="N", help="repeats of each setting")
    how = made.add_argument_group("how it runs")
    how.add_argument("--site", help="where it runs: local, this machine (default)")
    how.add_argument(
        "--max-running", type=int, default=1, metavar="N", help="runs at one time (default 1)"
    )
    how.add_argument(
        "--dry-run", action="store_true", help="print each command; write and start nothing"
    )
    how.add_argument("--no-wait", action="store_true", help="start it in the background and return")
    add_spec_arguments(made, skip=("strategy", "repeat"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit code."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except UsageError as error:
        print(f"run_benchmarks.py: error: {error}", file=sys.stderr)
        return Exit.USAGE


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for. Raises UsageError."""
    own = ("name", "strategies", "gpus", "gpus_per_node", "repeats")
    given: dict[str, Any] = {k: getattr(args, k) for k in own if getattr(args, k) is not None}
    if args.max_running < 1:
        raise UsageError(f"--max-running {args.max_running}: must be 1 or more")
    if args.site not in (None, "local"):
        raise UsageError(f"unknown site '{args.site}' (known: local)")
    return Study.load(args.study, **given, **given_settings(args)).expand()


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask for."""
    plan = make_plan(args)
    if args.dry_run:
        return dry_run(plan)

    from rich.console import Console

    from jobkit.launch.launcher import UNDER_WAY, launch

    console = Console(highlight=False)
    started = launch(plan, at_once=args.max_running, detach=args.no_wait)
    announce(started, console)
    if not started.run_ids and any(s.status in UNDER_WAY for s in started.states().values()):
        name = plan.study.name
        console.print(f"next: python -m jobkit status {name} --watch, or: ... cancel {name}")
        return Exit.OK
    if not started.run_ids:
        return conclude(started, started.states(), console)
    if args.no_wait:
        name = plan.study.name
        console.print(
            f"started in the background, by process {started.driver and started.driver.pid}\n"
            f"next: python -m jobkit status {name} | python -m jobkit cancel {name}",
            soft_wrap=True,
        )
        return Exit.OK
    return follow(started, console)


def dry_run(plan: Plan) -> int:
    """Print each command that would be started; write nothing."""
    from jobkit.launch.command import local_command, shown
    from jobkit.launch.launcher import check, to_start, warnings

    check(plan)
    start = to_start(plan)
    for note in (*plan.notes, *warnings(plan)):
        print(f"# note: {note}")
    for run_id, spec in plan.runs.items():
        print(f"# {run_id}" + ("" if run_id in start else ": done or running, not started again"))
        if run_id in start:
            print(shown(local_command(spec, plan.paths.run(run_id).folder)))
    print(f"# {len(start)} of {len(plan.runs)} runs would start; nothing was written")
    return Exit.OK


def announce(started: "Launch", console: "Console") -> None:
    """Say what is going to happen."""
    total, new = len(started.plan.runs), len(started.run_ids)
    now = Counter(started.states()[r].status for r in started.plan.runs if r not in started.run_ids)
    for note in started.plan.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    before = "".join(f", {n} {status} already" for status, n in now.items())
    how = f"{new} to start, {started.at_once} at a time" if new else "none to start"
    console.print(
        f"study {started.plan.study.name}: {total} runs planned{before}, {how}, "
        f"in {relative(started.folder)}",
        soft_wrap=True,
    )


def follow(started: "Launch", console: "Console") -> int:
    """Show the study until it has ended; end its runs on Ctrl-C, SIGTERM or a closed terminal."""
    import signal

    from jobkit.launch.view import View

    def stop(signum: int, _frame: object) -> None:
        raise Stopped(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    view = View(started, console)
    try:
        found = view.follow()
    except Stopped as stopped:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # an impatient second one must not leave orphans
        console.print("stopping: ending the runs under way ...", style="yellow")
        started.cancel()
        conclude(started, started.states(), console, stopped=True)
        return Exit.INTERRUPTED if stopped.signum == signal.SIGINT else Exit.TERMINATED
    return conclude(started, found, console)


class Stopped(BaseException):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def conclude(
    started: "Launch", found: "dict[str, RunState]", console: "Console", stopped: bool = False
) -> int:
    """Say what became of the runs, where it is, and what to do next."""
    bad = {run_id: state for run_id, state in found.items() if state.status != "ok"}
    again = "run the same command again: only these are started"
    if bad:
        console.print(f"{len(found) - len(bad)} of {len(found)} runs are ok; not ok:")
        for run_id, state in bad.items():
            if state.status == "missing":
                continue
            console.print(
                f"  {run_id}: {state.status}: {state.reason}", style="red", soft_wrap=True
            )
            console.print(
                f"    log: {relative(started.plan.paths.run(run_id).log)}", soft_wrap=True
            )
        if never := sum(state.status == "missing" for state in bad.values()):
            console.print(f"  {never} never started", style="red")
        console.print(f"to go on, {again}", soft_wrap=True)
    else:
        console.print(f"all {len(found)} runs are ok", style="green")
    if not stopped:
        console.print(f"next: ./plot_results.sh {relative(started.folder)}", soft_wrap=True)
    return Exit.FAILED if bad else Exit.OK


def relative(path: Path) -> str:
    """The path as one types it from here."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except OSError:
        return str(path)
