"""`python run_benchmarks.py`: expand a study, run what is missing, show how it goes."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit import __version__
from jobkit.errors import Exit, Parser, UsageError, at_least
from jobkit.launch.dry_run import dry_run
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import known_sites
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.slurm.options import OVERRIDES, verbatim
from jobkit.spec.options import add_spec_arguments, given_settings
from jobkit.spec.plan import STUDIES, Plan, Study

if TYPE_CHECKING:  # so that --help imports neither rich nor submitit
    from rich.console import Console

    from jobkit.launch.launcher import Launch
    from jobkit.outcome.status import RunState

DEFAULT_STUDY = "strong"
ONLY = ("missing", "failed", "oom", "timeout", "preempted", "cancelled", "node_fail")
EPILOG = """examples:
  python run_benchmarks.py --study demo                        a first look, on any machine
  python run_benchmarks.py --study strong --dry-run            print each command, write nothing
  python run_benchmarks.py --strategies ddp fsdp --gpus 1 2 --repeats 3 --epochs 3
  python run_benchmarks.py --study my.toml --name wide --width 4 --precision bf16
  python run_benchmarks.py --gpus 4 8 16 --gpus-per-node 4 -A project -- --nice=100

Run the same command again: only runs that are missing or failed are started.
Exit codes: 0 all runs are ok, 1 a run is not, 2 wrong usage, 130 and 143 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of run_benchmarks.py."""
    made = Parser(
        prog="run_benchmarks.py",
        description="Run a study: the same training under several strategies and sizes.",
        epilog=EPILOG,
    )
    known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.toml")))
    made.add_argument("--version", action="version", version=f"jobkit {__version__}")
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
    how.add_argument(
        "--site",
        help=f"where it runs: local (this machine), slurm, {', '.join(known_sites())}, or a TOML "
        "file (default: the cluster's, where there is Slurm, else local)",
    )
    how.add_argument(
        "--max-running",
        type=int,
        metavar="N",
        help="runs at one time (default: 1 on this machine, any number on Slurm)",
    )
    how.add_argument("--only", choices=ONLY, help="start only the runs with this status")
    how.add_argument(
        "--max-restarts",
        type=at_least(int, 0),
        metavar="N",
        help="how often a run goes on from its checkpoint: on Slurm after it was stopped early "
        "(default 3), here after it was stopped or failed (default 0)",
    )
    how.add_argument(
        "--monitor-interval",
        type=at_least(float, 0.001),
        metavar="S",
        help="here: seconds between two looks at a run's ranks (default 0.1)",
    )
    how.add_argument(
        "--start-timeout",
        type=at_least(float, 0.001),
        metavar="S",
        help="here: seconds in which all ranks of a run must have started (default 60)",
    )
    how.add_argument(
        "--dry-run", action="store_true", help="print each command; write and start nothing"
    )
    how.add_argument("--no-wait", action="store_true", help="start it in the background and return")
    add_slurm_arguments(made)
    add_spec_arguments(made, skip=("strategy", "repeat"))
    return made


def add_slurm_arguments(made: argparse.ArgumentParser) -> None:
    """Options that count on Slurm only."""
    group = made.add_argument_group(
        "on Slurm", "They win over the site's profile. What comes after -- goes to sbatch as it is."
    )
    for name, (short, text) in OVERRIDES.items():
        flags = [f"--{name}"] + ([short] if short else [])
        group.add_argument(*flags, help=text, metavar="X", dest=f"sbatch_{name}")
    group.add_argument(
        "--exclusive", action="store_true", dest="sbatch_exclusive", help="whole nodes"
    )
    group.add_argument(
        "--within-allocation",
        action="store_true",
        help="all runs in one allocation of the largest size, on the same nodes, one by one",
    )
    group.add_argument(
        "--max-node-hours", type=float, metavar="X", help="refuse a plan that may take more"
    )
    group.add_argument(
        "--no-collect",
        action="store_true",
        help="no job that collects and plots when all others have ended",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    try:
        return run(args, words[cut + 1 :])
    except UsageError as error:
        print(f"run_benchmarks.py: error: {error}", file=sys.stderr)
        return Exit.USAGE


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for, on nodes as the site has them. Raises UsageError."""
    own = ("name", "strategies", "gpus", "gpus_per_node", "repeats")
    given: dict[str, Any] = {k: getattr(args, k) for k in own if getattr(args, k) is not None}
    study = Study.load(args.study, **given, **given_settings(args))
    site = find_site(args.site, ask=not args.dry_run)
    if site is not None and study.gpus_per_node is None:
        study = study.changed(gpus_per_node=site.gpus_per_node)
    return study.expand()


def make_request(args: argparse.Namespace, verbatim_words: Sequence[str]) -> LaunchRequest:
    """How the arguments ask to launch. Raises UsageError."""
    names = {f"sbatch_{name}": name for name in (*OVERRIDES, "exclusive")}
    given = {name: getattr(args, dest) for dest, name in names.items() if getattr(args, dest)}
    return LaunchRequest(
        site=args.site,
        at_once=args.max_running,
        detach=args.no_wait,
        only=args.only,
        options={**given, **verbatim(verbatim_words)},
        collect=not args.no_collect,
        within_allocation=args.within_allocation,
        max_node_hours=args.max_node_hours,
        max_restarts=args.max_restarts,
        torchrun=tuple(
            word
            for name in ("monitor_interval", "start_timeout")
            if (value := getattr(args, name)) is not None
            for word in ("--" + name.replace("_", "-"), f"{value:.3f}")
        ),
    )


def run(args: argparse.Namespace, verbatim_words: Sequence[str]) -> int:
    """Do what the arguments ask for."""
    plan, request = make_plan(args), make_request(args, verbatim_words)
    if args.dry_run:
        return dry_run(plan, request)

    from rich.console import Console

    from jobkit.launch.launcher import launch, under_way

    console, name = Console(highlight=False, markup=False), plan.study.name
    started = launch(plan, request)
    announce(started, console)
    follow_up = f"next: python -m jobkit status {name} --watch | python -m jobkit cancel {name}"
    if started.runs and args.no_wait:
        console.print(follow_up, soft_wrap=True)
        return Exit.OK
    if not started.runs and under_way(started.states()):
        console.print(follow_up, soft_wrap=True)
        return Exit.OK
    if not started.runs:
        return conclude(started, started.states(), console)
    return follow(started, console)


def announce(started: "Launch", console: "Console") -> None:
    """Say what is going to happen, and where."""
    for note in (*started.plan.notes, *started.notes):
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    total, new = len(started.plan.runs), len(started.run_ids)
    now = Counter(s.status for r, s in started.states().items() if r not in started.run_ids)
    before = "".join(f", {n} {status} already" for status, n in now.items())
    how = f"{new} to start" if new else "none to start"
    if new and started.at_once:
        how += f", {started.at_once} at a time"
    console.print(
        f"study {started.plan.study.name}: {total} runs planned{before}, {how}, "
        f"in {relative(started.folder)}",
        soft_wrap=True,
    )
    if started.runs:
        console.print(f"started: {started.runs.where}", soft_wrap=True)


def follow(started: "Launch", console: "Console") -> int:
    """Show the study until it has ended.

    Ctrl-C, SIGTERM or a closed terminal end its runs here; jobs on Slurm go on without us.
    """
    import signal

    from jobkit.launch.follow.view import View

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
        code = Exit.INTERRUPTED if stopped.signum == signal.SIGINT else Exit.TERMINATED
        if started.site is not None:
            name = started.plan.study.name
            console.print(f"the jobs go on; to end them: python -m jobkit cancel {name}")
            return code
        console.print("stopping: ending the runs under way ...", style="yellow")
        started.cancel()
        conclude(started, started.states(), console, stopped=True)
        return code
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
