"""`python -m jobkit drill`: inject faults into a training and measure the recovery.

Each fault has its own run, which is restarted as a user, jobkit or Slurm would. Parameters of
jobkit's own training are compared with those of a run without a fault.
"""

import argparse
import contextlib
import functools
import math
import sys
import threading
from collections.abc import Sequence

from jobkit.drill.faults import FAULTS, REFERENCE, show, write_csv
from jobkit.drill.places import LocalPlace, Place, SlurmPlace
from jobkit.drill.programs import Program
from jobkit.drill.run import PATIENCE_S, Drill
from jobkit.errors import Exit, Parser, UsageError, command, one_of, positive
from jobkit.files import file_names
from jobkit.launch.slurm_cluster import find_site
from jobkit.paths import StudyPaths
from minicluster.cluster import on_signals, temporary

EPILOG = """examples:
  python -m jobkit drill --minicluster              every fault, on a temporary Slurm cluster
  python -m jobkit drill --local                    the faults that need no Slurm
  python -m jobkit drill --faults kill warning -A project --urgent-partition high
  python -m jobkit drill --local -- python train.py             a program of your own, on 2 ranks

Faults:
{faults}
The last three need Slurm, and preemption --urgent-partition or --minicluster.

Exit codes: 0 recovered from every fault, with bitwise equal parameters (of a command they are not
compared) and no leaked process; 4 not from every fault; 2 wrong usage; 130 interrupted.
logs/drill/drill.csv has one row per fault, and logs/drill/FAULT/ is the folder of its run.
"""


def parser() -> argparse.ArgumentParser:
    new = Parser(
        prog="jobkit drill",
        usage="jobkit drill [options] [-- COMMAND]",
        description="Inject faults into a short training of jobkit's own, or into a command on 2 "
        "ranks, and measure the recovery.",
        epilog=EPILOG.format(faults="\n".join(f"  {f.name:<11} {f.text}" for f in FAULTS.values())),
    )
    where = new.add_mutually_exclusive_group()
    where.add_argument("--minicluster", action="store_true", help="on a temporary minicluster")
    where.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    new.add_argument("--faults", nargs="+", metavar="NAME", help="inject only these faults")
    new.add_argument(
        "--patience", type=positive, default=PATIENCE_S, metavar="S",
        help="seconds in which a run must start, end or start again (default 400)",
    )  # fmt: skip
    new.add_argument("--site", help="site profile (default: that of this cluster)")
    new.add_argument("-A", "--account", help="account to charge")
    new.add_argument("-p", "--partition", help="partition")
    new.add_argument("--urgent-partition", metavar="P", help="partition whose jobs preempt others")
    new.add_argument(
        "--device", choices=("cpu", "cuda"),
        help="device of the training; bitwise equality is promised on CPUs of one kind, and on "
        "GPUs of one kind with --deterministic, which the drill sets there (default cpu)",
    )  # fmt: skip
    return new


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:end])
    names = args.faults or list(FAULTS)
    for name in names:
        one_of("fault", name, FAULTS)
    program = program_of(args, words[end:])
    from rich.console import Console  # --help needs no rich

    width = None if sys.stdout.isatty() else 100
    study, console = StudyPaths.named("drill"), Console(highlight=False, markup=False, width=width)
    say = functools.partial(console.print, soft_wrap=True)
    if strange := {*file_names(study.folder)} - {*FAULTS, REFERENCE.name, study.drill.name}:
        what = "is not of a drill, which would clear the folder: move it away"
        raise UsageError(f"{study.folder / min(strange)} {what}")
    halted = threading.Event()  # on which the drill ends its runs
    with on_signals(lambda *_: halted.set()), contextlib.ExitStack() as stack:
        if args.minicluster:
            say("bringing up a minicluster ...")
            stack.enter_context(temporary("drill", preemption=True))
        drill = Drill(
            place=place_of(args), study=study, program=program, patience_s=args.patience, say=say,
            halted=halted,
        )  # fmt: skip
        rows = drill.run([FAULTS[name] for name in names])
    write_csv(rows, study.drill)
    show(rows, console)
    bad = [row.fault for row in rows if not row.good]
    tried = sum(row.possible for row in rows)
    equal = "" if program.words else ", with bitwise equal parameters"
    say(f"{tried - len(bad)} of {tried} faults: recovered{equal}")
    say(f"wrote {study.drill}; the folders of the runs are beside it")
    if halted.is_set():
        return Exit.INTERRUPTED
    return Exit.THRESHOLD if bad else Exit.OK


def program_of(args: argparse.Namespace, words: Sequence[str]) -> Program:
    """What the drill starts: the command after --, else jobkit's training. Raises UsageError."""
    if not words:
        return Program(device=args.device or "cpu")
    if not words[1:]:
        raise UsageError("-- needs a command after it, as: -- python train.py")
    if args.device:
        raise UsageError("--device is of jobkit's own training, not of a command")
    # From the start to the fault, from there to the end, and as long again.
    return Program(words=tuple(words[1:]), minutes=max(10, math.ceil(3 * args.patience / 60)))


def place_of(args: argparse.Namespace) -> Place:
    """The place where the drill runs. Raises UsageError for an option of Slurm without one."""
    site = find_site("local" if args.local else args.site)
    if site is None:
        for name in ("site", "account", "partition", "urgent_partition"):
            if getattr(args, name) and (name, args.site) != ("site", "local"):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option}: is for Slurm, but the runs start on this machine")
        return LocalPlace()
    options = {k: v for k in ("account", "partition") if (v := getattr(args, k))}
    return SlurmPlace(site, options, args.urgent_partition)
