"""`python -m jobkit drill`: inject faults into a short training and measure the recovery.

Each fault has its own run, which is restarted as a user, jobkit or Slurm would, and compared with
a run without a fault.
"""

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from jobkit.drill.fault import FaultCase
from jobkit.drill.fault_run import FaultRun, Halted
from jobkit.drill.faults import FAULTS, NODE_FAULTS, WIDE
from jobkit.drill.place import LocalPlace, Place, compare
from jobkit.drill.row import Row, checkpoint_bytes, with_parameters
from jobkit.drill.slurm import SlurmPlace
from jobkit.errors import Exit, Parser, UsageError, command, one_of
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.slurm.minicluster import Minicluster
from jobkit.paths import RunPaths, StudyPaths

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE = "reference"
# 64 iterations, with a checkpoint at every tenth and in the end.
TRAINING: dict[str, object] = {
    "strategy": "ddp",
    "model": "mlp",
    "dataset": "synthetic",
    "train_samples": 2000,
    "test_samples": 256,
    "global_batch_size": 64,
    "epochs": 2,
    "threads": 1,
    "checkpoint_every": "10",
    "breakdown_iterations": 0,
}
FIRST, LAST = 21, 60  # after two checkpoints, and some iterations before the end
EPILOG = """examples:
  python -m jobkit drill --minicluster              every fault, on a temporary Slurm cluster
  python -m jobkit drill --local                    the faults that need no Slurm
  python -m jobkit drill --faults kill warning -A project --urgent-partition high
  python -m jobkit drill --list

Exit codes: 0 recovered from every fault, with bitwise equal parameters and no leaked process; 4 not
from every fault; 2 wrong usage; 130 interrupted. logs/NAME/drill.csv has one row per fault, and
logs/NAME/FAULT/ is the folder of its run.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of drill."""
    made = Parser(
        prog="jobkit drill",
        description="Inject faults into a short training, and measure the recovery.",
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
        help=f"inject the fault after this iteration, {FIRST} to {LAST} (default 25)",
    )
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
        "--device", default="cpu", choices=("cpu", "cuda"),
        help="device of the training; bitwise equality is promised on CPUs of one kind, and on "
        "GPUs of one kind with --deterministic, which the drill sets there (default cpu)",
    )  # fmt: skip
    made.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill; return the exit code."""
    args = parser().parse_args(argv)
    if args.command:
        raise UsageError(
            f"drill {shlex.join(args.command)[:80]}: the faults are for jobkit's own training, "
            "whose parameters it compares; how to try a command: docs/faults.md"
        )
    try:
        if args.list:
            from jobkit.drill.table import listing

            print(listing())
            return Exit.OK
        names = args.faults or list(FAULTS)
        for name in names:
            one_of("fault", name, FAULTS)
        if not FIRST <= args.at <= LAST:
            raise UsageError(f"--at {args.at}: must be from {FIRST} to {LAST}")
        return run(args, [FAULTS[name] for name in names])
    except Halted:
        return Exit.INTERRUPTED


def run(args: argparse.Namespace, faults: Sequence[FaultCase]) -> int:
    """Run the drill where the arguments say; return the exit code."""
    from rich.console import Console

    from jobkit.drill.table import show, write_csv

    study, console = StudyPaths.named(args.name), Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=100)
    clear(study)
    with interruptible() as halted, place_of(args, console) as place:
        drill = Drill(place, study, args, console, halted)
        rows = drill.run(faults)
    write_csv(rows, study.drill)
    show(rows, console)
    bad = [row.fault for row in rows if not row.good]
    tried = sum(row.possible for row in rows)
    console.print(f"{tried - len(bad)} of {tried} faults: recovered, with bitwise equal parameters")
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
        args: argparse.Namespace,
        console: "Console",
        halted: threading.Event,
    ) -> None:
        self.place, self.study, self.console = place, study, console
        self.at, self.halted, self.bytes = args.at, halted, 0
        on_gpu = {"deterministic": True} if args.device == "cuda" else {}
        self.settings = {**TRAINING, "device": args.device, **on_gpu}
        self.token = secrets.token_hex(6)

    def run(self, faults: Sequence[FaultCase]) -> list[Row]:
        """Run the reference, then a run for each fault; return their rows, in order."""
        self.console.print(f"{REFERENCE}: the run without a fault, as the reference")
        self._reference()
        whys = {fault.name: impossible(self.place, fault) for fault in faults}
        todo = [fault for fault in faults if not whys[fault.name]]
        futures = self._in_lanes(todo)
        rows = [
            Row(fault=fault.name, note=f"not possible here: {whys[fault.name]}")
            if fault not in todo
            else futures[fault.name].result()
            for fault in faults
        ]
        self.console.print("comparing the parameters ...")
        folder = self.study.folder
        tried = [folder / row.fault for row in rows if row.possible]
        return with_parameters(rows, compare(folder / REFERENCE, tried), folder)

    def _reference(self) -> None:
        plain = FaultCase(name=REFERENCE, text="", first=("ok",), kind="")
        reference = self._fault_run(plain)
        row = reference.run_reference()
        if row.final_status != "ok":
            raise UsageError(f"the run without a fault failed: see {reference.paths.log}")
        self.bytes = checkpoint_bytes(reference.paths)

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
            at=self.at,
            settings=self.settings,
            mark=f"{self.token}-{fault.name}",
            checkpoint_bytes=self.bytes,
            say=lambda text: self.console.print(text, soft_wrap=True),
            halted=self.halted,
        )


def impossible(place: Place, fault: FaultCase) -> str:
    """Return why a fault cannot be injected at a place; empty if it can."""
    if place.name not in fault.where:
        return "it needs Slurm"
    slurm = place if isinstance(place, SlurmPlace) else None
    cluster = slurm.cluster if slurm else None
    if fault.needs == "urgent" and not (slurm and slurm.urgent):
        return "no partition whose jobs preempt others: name one with --urgent-partition"
    if fault.needs in ("minicluster", "links") and cluster is None:
        return "it kills daemons of the cluster: needs --minicluster"
    if fault.needs == "links" and cluster and not cluster.links:
        return "the nodes have no separate network links: needs minicluster up --netns, as root"
    if fault.needs == "root" and (os.geteuid() != 0 or place.namespace() is None):
        return "only root can mount a small file system, on this machine or on root's minicluster"
    return ""
