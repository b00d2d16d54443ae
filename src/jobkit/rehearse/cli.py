"""`python -m jobkit rehearse`: a job at full size, with simulated ranks.

The launcher, run.sh, srun, the collector and the report are the product's own, on a minicluster;
only the ranks are simulated. Each size has a study of one run.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobkit.errors import Exit, NotStarted, Parser, UsageError, command, whole
from jobkit.launch.slurm.minicluster import Minicluster
from jobkit.launch.states import States
from jobkit.outcome.facts import read_job, seconds
from jobkit.outcome.status import UNDER_WAY
from jobkit.paths import logs_root
from jobkit.rehearse.growth import faster, files_of, table, timed
from jobkit.rehearse.standin import STEPS
from jobkit.spec.plan import Plan
from jobkit.spec.studies import read_plan

MOST_NODES, MOST_RANKS_PER_NODE = 256, 256  # as hpc/minicluster takes
MIB_OF_A_RANK = 16  # a bound: a Python and two shells
_POLL_S, _MOST_S = 1.0, 300.0
_MOST_PENDING_S = 900.0  # a node that was lost comes back within it
_SITE = """description = "minicluster, without its simulated GPUs"
gpu_request = "none"
time = "01:00:00"
"""
_WORDS = ("--no-collect", "--no-wait", "--no-auto")
_SAID = re.compile(r"^\[simulated\] rank [0-9]+: ([0-9]+) read and write calls", re.MULTILINE)
EPILOG = """examples:
  python -m jobkit rehearse --nodes 256 --ranks-per-node 4     1,024 simulated ranks
  python -m jobkit rehearse --nodes 8 --ranks-per-node 4 --keep

The ranks are simulated: small processes without torch that write a rank's records. Their Slurm is
hpc/minicluster: the one that `hpc/minicluster env` named in this shell, else one made for it. The
seconds are of this machine, which all nodes share; how they grow is what counts. Calls are those
that read or write; opens and stats are not counted (strace counts them: docs/clusters.md).
Exit codes: 0 done; 1 a step failed; 2 wrong usage, or Slurm is not installed;
129, 130 and 143 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of rehearse."""
    made = Parser(
        prog="jobkit rehearse",
        description="Rehearse a job at full size on this machine, with simulated ranks.",
        epilog=EPILOG,
    )
    made.add_argument(
        "--nodes", type=whole(1), required=True, metavar="N",
        help=f"nodes of the largest size, at most {MOST_NODES}; also a half, a quarter, an eighth",
    )  # fmt: skip
    made.add_argument(
        "--ranks-per-node", type=whole(1), required=True, metavar="M",
        help=f"simulated ranks on each node, at most {MOST_RANKS_PER_NODE}",
    )  # fmt: skip
    made.add_argument(
        "--steps", type=whole(1, 10**5), default=STEPS, metavar="N",
        help=f"steps of each simulated rank, of 10 ms (default {STEPS})",
    )  # fmt: skip
    made.add_argument("--keep", action="store_true", help="keep the studies, under logs/")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse each size, then print what grew; return the exit code."""
    args = parser().parse_args(argv)
    check(args.nodes, args.ranks_per_node)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    root = logs_root()
    root.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="rehearse-", dir=root)).absolute()
    os.environ["JOBKIT_LOGS"] = str(logs)
    keep = True  # unless all went well
    try:
        with cluster(args.nodes, args.ranks_per_node):
            report(args, [rehearse(logs, args, nodes) for nodes in sizes(args.nodes)])
        keep = args.keep
    finally:
        if keep and any(logs.iterdir()):
            print(f"kept: {logs}")
        else:
            shutil.rmtree(logs)
    return Exit.OK


def check(nodes: int, ranks_per_node: int) -> None:
    """Raise UsageError for a size that the minicluster or this machine's memory cannot hold."""
    if nodes > MOST_NODES:
        raise UsageError(
            f"--nodes {nodes}: a minicluster has at most {MOST_NODES}; "
            f"use more ranks on each, as --nodes {MOST_NODES} --ranks-per-node 16"
        )
    if ranks_per_node > MOST_RANKS_PER_NODE:
        raise UsageError(
            f"--ranks-per-node {ranks_per_node}: must be at most {MOST_RANKS_PER_NODE}"
        )
    free = re.search(r"MemAvailable: +([0-9]+) kB", Path("/proc/meminfo").read_text())
    ranks, mib = nodes * ranks_per_node, int(free[1]) >> 10 if free else 0
    if free and ranks * MIB_OF_A_RANK > mib:
        raise UsageError(
            f"{ranks:,} simulated ranks may take {ranks * MIB_OF_A_RANK:,} MiB, and {mib:,} MiB "
            f"are free: at most {mib // MIB_OF_A_RANK:,} ranks"
        )


def sizes(nodes: int) -> list[int]:
    """The numbers of nodes to rehearse, from two on: an eighth, a quarter, half and all of them."""
    return sorted({max(min(nodes, 2), nodes // part) for part in (8, 4, 2, 1)})


@contextlib.contextmanager
def cluster(nodes: int, ranks_per_node: int) -> Iterator[None]:
    """Use the minicluster that this shell points at, else one made for the rehearsal."""
    if named := Minicluster.named():
        if (there := len(named.nodes)) < nodes:
            raise UsageError(f"--nodes {nodes}: the minicluster in {named.folder} has {there}")
        yield
        return
    print(f"bringing up a minicluster of {nodes} nodes ...", flush=True)
    options = (f"--nodes={nodes}", f"--cores={ranks_per_node}", "--gpus=0")
    made = Minicluster.up("rehearse", *options)
    try:
        yield
    finally:
        made.down()


def rehearse(logs: Path, args: argparse.Namespace, nodes: int) -> dict[str, float]:
    """Rehearse one size; return its quantities by name. Raises NotStarted where a step fails."""
    size = f"{nodes}x{args.ranks_per_node}"
    name, log = f"rehearse-{size}", logs / f"rehearse-{size}.log"
    site = logs / "site.toml"
    site.write_text(_SITE)
    stand_in = [sys.executable, "-m", "jobkit.rehearse.standin", "--steps", str(args.steps)]
    print(f"{size}: {nodes * args.ranks_per_node:,} simulated ranks ...", flush=True)
    words = ["--name", name, "--gpus", size, "--site", str(site), *_WORDS, "--", *stand_in]
    submit = timed(_jobkit("run", *words), log)
    plan = read_plan(logs / name)
    job_s, counted = wait(plan)
    files, mib = files_of(plan.paths.folder)
    collect, plot = (timed(_jobkit(step, name), log) for step in ("collect", "plot"))
    return {
        "submit, CPU s": submit.cpu_s,
        "submit, calls": submit.calls,
        "job, s": job_s,
        "job, files": files,
        "job, MiB": mib,
        "one rank, calls": counted,
        "collect, CPU s": collect.cpu_s,
        "collect, calls": collect.calls,
        "report, CPU s": plot.cpu_s,
        "report, calls": plot.calls,
    }


def _jobkit(*words: str) -> list[str]:
    return [sys.executable, "-m", "jobkit", *words]


def wait(plan: Plan) -> tuple[float, int]:
    """Wait for the only run of a study; return its seconds, and the calls of its last rank.

    Raises NotStarted where it fails, or waits for a place for _MOST_PENDING_S.
    """
    states, (run_id,) = States(plan), plan.runs
    paths = plan.paths.run(run_id)
    begun = placed = time.monotonic()
    try:
        while (state := states.look()[run_id]).status in UNDER_WAY:
            time.sleep(_POLL_S)
            begun = time.monotonic()
            placed = placed if state.status == "pending" else begun
            if begun - placed > _MOST_PENDING_S:
                raise NotStarted(
                    f"{run_id}: has not started for {begun - placed:.0f} s: {state.reason}; is the "
                    "minicluster taken by others? look with squeue"
                )
        if state.status != "ok":
            raise NotStarted(f"{run_id}: {state.status}: {state.reason}; see {paths.log}")
        while "elapsed_s" not in (read_job(paths) or {}) and time.monotonic() < begun + _MOST_S:
            time.sleep(_POLL_S)  # the rank's record of its end comes before that of its job
    except BaseException:
        with contextlib.suppress(NotStarted):  # what was raised is said
            timed(_jobkit("cancel", plan.study.name), plan.paths.folder / "cancel.log")
        raise
    said = _SAID.search(paths.log.read_text(errors="replace"))
    return seconds((read_job(paths) or {}).get("elapsed_s")), int(said[1]) if said else 0


def report(args: argparse.Namespace, found: Sequence[dict[str, float]]) -> None:
    """Print the table of the sizes, and what grows faster than the job."""
    nodes, m = sizes(args.nodes), args.ranks_per_node
    ranks, rows = [n * m for n in nodes], {name: [f[name] for f in found] for name in found[0]}
    print(f"\nall ranks are simulated, on {len(os.sched_getaffinity(0))} cores of this machine\n")
    print(table([f"{n}x{m}" for n in nodes], ranks, rows))
    if len(nodes) > 1:
        names = faster(ranks, rows)
        print(f"\ngrows faster than the job: {'; '.join(names) if names else 'nothing'}")
