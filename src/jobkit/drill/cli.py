"""`python -m jobkit drill`: inject faults into a training and measure the recovery.

Each fault has its own run, which is restarted as a user, jobkit or Slurm would. Parameters of
jobkit's own training are compared with those of a run without a fault.
"""

import argparse
import contextlib
import math
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from jobkit.drill.fault import FaultCase
from jobkit.drill.fault_run import PATIENCE_S, FaultRun, Halted
from jobkit.drill.faults import FAULTS, NODE_FAULTS, WIDE
from jobkit.drill.place import LocalPlace, Place
from jobkit.drill.possible import impossible
from jobkit.drill.program import FIRST, LAST, Command, Program, Training
from jobkit.drill.row import Row
from jobkit.drill.slurm import SlurmPlace
from jobkit.errors import Exit, Parser, UsageError, command, one_of, positive
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.slurm.minicluster import Minicluster
from jobkit.paths import RunPaths, StudyPaths

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE = "reference"
EPILOG = """examples:
  python -m jobkit drill --minicluster              every fault, on a temporary Slurm cluster
  python -m jobkit drill --local                    the faults that need no Slurm
  python -m jobkit drill --faults kill warning -A project --urgent-partition high
  python -m jobkit drill --list
  python -m jobkit drill --local --at 100 -- python train.py    a program of your own, on 2 ranks

Exit codes: 0 recovered from every fault, with bitwise equal parameters (of a command they are not
compared) and no leaked process; 4 not from every fault; 2 wrong usage; 130 interrupted.
logs/NAME/drill.csv has one row per fault, and logs/NAME/FAULT/ is the folder of its run.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of drill."""
    made = Parser(
        prog="jobkit drill",
        usage="jobkit drill [options] [-- COMMAND]",
        description="Inject faults into a short training of jobkit's own, or into a command on 2 "
        "ranks, and measure the recovery.",
        epilog=EPILOG,
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument("--minicluster", action="store_true", help="on a temporary minicluster")
    where.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    made.add_argument(
        "--faults", nargs="+", metavar="NAME", help="inject only these faults (see --list)"
    )
    made.add_argument("--list", action="store_true", help="list the faults and exit")
    made.add_argument(
        "--at",
        type=int,
        default=25,
        metavar="N",
        help=f"inject the fault after this iteration, {FIRST} to {LAST}, or after this step that "
        "the command records (default 25)",
    )
    made.add_argument(
        "--after", type=positive, metavar="S",
        help="seconds from the start to the fault, for a command that records no steps",
    )  # fmt: skip
    made.add_argument(
        "--patience", type=positive, default=PATIENCE_S, metavar="S",
        help="seconds in which a run must start, end or start again (default 400)",
    )  # fmt: skip
    made.add_argument("--name", default="drill", help="folder under logs/ (default drill)")
    made.add_argument("--site", help="site profile (default: that of this cluster)")
    made.add_argument("-A", "--account", help="account to charge")
    made.add_argument("-p", "--partition", help="partition")
    made.add_argument(
        "--urgent-partition",
        metavar="P",
        help="partition whose jobs preempt others",
    )
    made.add_argument(
        "--device", choices=("cpu", "cuda"),
        help="device of the training; bitwise equality is promised on CPUs of one kind, and on "
        "GPUs of one kind with --deterministic, which the drill sets there (default cpu)",
    )  # fmt: skip
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill; return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser().parse_args(given[:end])
    try:
        if args.list:
            from jobkit.drill.table import listing

            print(listing())
            return Exit.OK
        names = args.faults or list(FAULTS)
        for name in names:
            one_of("fault", name, FAULTS)
        program = program_of(args, given[end:])
        return run(args, program, [program.case(FAULTS[name]) for name in names])
    except Halted:
        return Exit.INTERRUPTED


def program_of(args: argparse.Namespace, words: Sequence[str]) -> Program:
    """What the drill starts: the command after --, else jobkit's training. Raises UsageError."""
    if not words:
        if args.after:
            raise UsageError("--after is for a command, which comes after --; here say --at")
        return Training(args.at, args.device or "cpu")
    if not words[1:]:
        raise UsageError("-- needs a command after it, as: -- python train.py")
    if args.device:
        raise UsageError("--device is of jobkit's own training: a command decides itself")
    if args.at < 1:
        raise UsageError(f"--at {args.at}: must be 1 or more")
    if args.after and args.after >= args.patience:
        raise UsageError(f"--after {args.after:g}: must be below --patience {args.patience:g}")
    # From the start to the fault, from there to the end, and as long again.
    minutes = max(10, math.ceil(3 * args.patience / 60))
    return Command(words=words[1:], at=args.at, after_s=args.after, minutes=minutes)


def run(args: argparse.Namespace, program: Program, faults: Sequence[FaultCase]) -> int:
    """Run the drill where the arguments say; return the exit code."""
    from rich.console import Console

    from jobkit.drill.table import show, write_csv

    study, console = StudyPaths.named(args.name), Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=100)
    clear(study)
    with interruptible() as halted, place_of(args, console) as place:
        drill = Drill(place, study, program, args.patience, console, halted)
        rows = drill.run(faults)
    write_csv(rows, study.drill)
    show(rows, console)
    bad = [row.fault for row in rows if not row.good]
    tried = sum(row.possible for row in rows)
    equal = "" if isinstance(program, Command) else ", with bitwise equal parameters"
    console.print(f"{tried - len(bad)} of {tried} faults: recovered{equal}")
    console.print(f"wrote {study.drill}; the folders of the runs are beside it", soft_wrap=True)
    if halted.is_set():
        return Exit.INTERRUPTED
    return Exit.THRESHOLD if bad else Exit.OK


def clear(study: StudyPaths) -> None:
    """Empty the drill's folder; raises UsageError for a folder with other files."""
    if study.plan.exists():
        raise UsageError(f"--name {study.folder.name}: is a study; choose another")
    ours = {*FAULTS, REFERENCE, study.drill.name}
    if study.folder.exists():
        strange = sorted(p.name for p in study.folder.iterdir() if p.name not in ours)
        if strange:
            raise UsageError(f"{study.folder} holds other files ({strange[0]}); choose a --name")
        shutil.rmtree(study.folder)
    study.folder.mkdir(parents=True)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that a signal sets, on which the drill ends its runs and undoes the faults."""
    halted = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda *_: halted.set()) for n in numbers}
    try:
        yield halted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def place_of(args: argparse.Namespace, console: "Console") -> Iterator[Place]:
    """Yield the place where the drill runs; take a temporary minicluster down at the end."""
    own = None
    try:
        if args.minicluster:
            console.print("bringing up a minicluster ...")
            own = Minicluster.up("drill", "--preemption", f"--nodes={WIDE}", links=True)
        site = find_site("local" if args.local else args.site)
        if site is None:
            yield LocalPlace()
        else:
            given = {k: v for k in ("account", "partition") if (v := getattr(args, k))}
            yield SlurmPlace(site, given, args.urgent_partition)
    finally:
        if own:
            own.down()


class Drill:
    """The runs of a drill."""

    def __init__(
        self,
        place: Place,
        study: StudyPaths,
        program: Program,
        patience_s: float,
        console: "Console",
        halted: threading.Event,
    ) -> None:
        self.place, self.study, self.console = place, study, console
        self.program, self.patience_s, self.halted, self.bytes = program, patience_s, halted, 0
        self.token = secrets.token_hex(6)

    def run(self, faults: Sequence[FaultCase]) -> list[Row]:
        """Run the reference, then a run for each fault; return their rows, in order."""
        self.console.print(f"{REFERENCE}: the run without a fault, as the reference")
        self._reference()
        own = self.program.impossible
        whys = {fault.name: own(fault) or impossible(self.place, fault) for fault in faults}
        todo = [fault for fault in faults if not whys[fault.name]]
        futures = self._in_lanes(todo)
        rows = [
            Row(fault=fault.name, note=f"not possible here: {whys[fault.name]}")
            if fault not in todo
            else futures[fault.name].result()
            for fault in faults
        ]
        return self.program.compared(rows, self.study.folder / REFERENCE)

    def _reference(self) -> None:
        plain = FaultCase(name=REFERENCE, text="", first=("ok",), kind="")
        reference = self._fault_run(plain)
        row = reference.run_reference()
        if row.final_status != "ok":
            why = f" ({row.evidence})" if row.evidence else ""
            raise UsageError(f"the run without a fault failed{why}: see {reference.paths.log}")
        self.bytes = self.program.check_reference(reference.paths, reference.started.took_s)

    def _in_lanes(self, faults: Sequence[FaultCase]) -> dict[str, "Future[Row]"]:
        """Run the independent faults concurrently, the others one by one; return the futures."""
        found: dict[str, Future[Row]] = {}
        lanes = {"shared": 1}
        if isinstance(self.place, SlurmPlace):
            # Those that hit a node wait for Slurm to notice, most of their time.
            cluster = self.place.cluster
            wide = cluster and len(cluster.nodes) >= WIDE
            lanes = {"shared": 2, "slow": 1, "nodes": len(NODE_FAULTS) if wide else 1}
        pools = {lane: ThreadPoolExecutor(n) for lane, n in lanes.items()}
        for fault in faults:
            if fault.lane in pools:
                found[fault.name] = pools[fault.lane].submit(self._one, fault)
        for pool in pools.values():
            pool.shutdown()
        for fault in faults:
            if fault.name not in found:
                with ThreadPoolExecutor(1) as alone:
                    found[fault.name] = alone.submit(self._one, fault)
        return found

    def _one(self, fault: FaultCase) -> Row:
        if self.halted.is_set():
            return Row(fault=fault.name, note="not injected: the drill was interrupted")
        try:
            row = self._fault_run(fault).run()
        except Halted:
            return Row(fault=fault.name, note="the drill was interrupted")
        self.console.print(
            f"{fault.name}: {row.first_status}, then {row.final_status}"
            + (f" ({row.note})" if row.note else ""),
            soft_wrap=True,
        )
        return row

    def _fault_run(self, fault: FaultCase) -> FaultRun:
        return FaultRun(
            fault=fault,
            place=self.place,
            paths=RunPaths(self.study.folder.absolute() / fault.name),
            program=self.program,
            mark=f"{self.token}-{fault.name}",
            patience_s=self.patience_s,
            checkpoint_bytes=self.bytes,
            say=lambda text: self.console.print(text, soft_wrap=True),
            halted=self.halted,
        )
