"""The commands of `hpc/minicluster`: parse, call, and report what was done."""

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, at_least
from minicluster import cluster as clusters
from minicluster import machine
from minicluster.config import MAX_NODES, Cluster
from minicluster.daemons import daemon_names
from minicluster.processes import dead

DESCRIPTION = """\
A real Slurm with several simulated nodes on this machine: to learn Slurm, to try a batch script
before it costs node-hours, and for tests. Jobs are real processes; GPUs are only counted.
"""
EXAMPLES = """\
examples:
  hpc/minicluster up                        4 nodes of 8 cores and 4 GPUs, with accounting
  eval "$(hpc/minicluster env)"             point sbatch, srun, squeue, ... at it in this shell
  sbatch --nodes=2 run.sh                   submit jobs as on any cluster
  hpc/minicluster down                      end the cluster and remove all its files

  sudo hpc/minicluster up --netns           each node with its own address and host name
  hpc/minicluster up --dir /tmp/second      a second cluster beside the first

exit codes: 0 ok; 1 failed, or a daemon does not run; 2 wrong usage, or missing packages
"""
COMMANDS = {
    "up": "start a cluster; returns when all nodes are idle",
    "status": "state of nodes and daemons; exit code 1 if a daemon does not run",
    "env": 'shell lines for eval "$(hpc/minicluster env)"',
    "down": "end the cluster and delete its folder",
}
SIZES = {  # option: Cluster's field, limits, and help
    "nodes": ("nodes", 1, MAX_NODES, "nodes, n1 to nN"),
    "cores": ("cores", 1, 1024, "cores of each node, simulated"),
    "gpus": ("gpus", 0, 64, "GPUs of each node, simulated"),
    "memory": ("memory_mib", 64, 1 << 24, "memory of each node in MiB, simulated"),
}
SWITCHES = {
    "preemption": "add a partition, urgent, whose jobs preempt (requeue) those of batch",
    "netns": "each node in a network namespace (needs root)",
    "memory-limits": "kill jobs that use more than their --mem; they end FAILED",
    "enforce": "jobs need an account and a QOS that exist in the accounting",
}
_FIRST_STEP = (
    "srun --nodes=2 --ntasks-per-node=2 --gpus-per-task=1 "
    "sh -c 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="hpc/minicluster", description=DESCRIPTION, epilog=EXAMPLES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    where = f"the cluster's folder (default: ${machine.DIR_VARIABLE}, else in /tmp)"
    new = {name: commands.add_parser(name, help=t, description=t) for name, t in COMMANDS.items()}
    for command in new.values():
        command.add_argument("--dir", help=where)
    for name, (field, low, high, text) in SIZES.items():
        usual = getattr(Cluster, field)
        new["up"].add_argument(
            f"--{name}", dest=field, type=at_least(int, low, high), default=usual, metavar="N",
            help=f"{text} (default: {usual})",
        )  # fmt: skip
    new["up"].add_argument(
        "--no-accounting", dest="accounting", action="store_false",
        help="no slurmdbd, no MariaDB, no sacct; faster",
    )  # fmt: skip
    for name, text in SWITCHES.items():
        new["up"].add_argument(f"--{name}", action="store_true", help=text)
    return top


def bring_up(root: Path, args: argparse.Namespace) -> None:
    """Bring a cluster up, and say what comes next."""
    begin = time.monotonic()
    asked = {name: value for name, value in vars(args).items() if name not in ("command", "dir")}
    cluster = clusters.up(Cluster(root=root, **asked), lambda text: print(text, flush=True))
    parts = f"{cluster.cores} cores, {cluster.gpus} GPUs, {cluster.memory_mib} MiB"
    took_s = time.monotonic() - begin
    print(f"up: {cluster.node_range} idle, each {parts}; {took_s:.1f} s")
    if os.geteuid() != 0:
        print("note: only your own jobs run: slurmd needs root to start another user's")
    if not machine.may_unshare():
        print(
            "note: node names (n1, ...) do not resolve inside jobs, as that needs the right to "
            "mount (root); take the address that `sinfo -h -n n1 -o %o` prints"
        )
    print(f'next:\n  eval "$(hpc/minicluster env --dir {root})"\n  sinfo\n  {_FIRST_STEP}')
    print(f"  hpc/minicluster down --dir {root}")


def status(root: Path) -> int:
    """Print the state of a cluster; return the exit code."""
    cluster = clusters.running(root, reading=True)
    own = root.stat().st_uid == os.geteuid()  # of root's cluster nobody else sees the daemons
    lost = dead(root, daemon_names(cluster)) if own else []
    # Slurm's commands try for ten seconds and more to reach a daemon that is gone.
    shown = {} if lost else machine.node_states(root)
    print(f"folder: {root}")
    for name in cluster.node_names:
        print(f"{name}: {shown.get(name, 'unknown')}")
    if lost:
        print(f"daemons not running: {', '.join(lost)}")
        print("start from scratch: hpc/minicluster up")
    elif own:
        print("daemons: all running")
    return Exit.FAILED if lost else Exit.OK


def run(args: argparse.Namespace) -> int:
    """Run one command; return its exit code."""
    root = clusters.folder_of(args.dir)
    match args.command:
        case "up":
            bring_up(root, args)
        case "status":
            return status(root)
        case "env":
            clusters.running(root, reading=True)
            for name, value in machine.exports(root).items():
                print(f"export {name}={shlex.quote(value)}")
        case "down":
            print(f"down: {root}" if clusters.down(root) else f"no cluster in {root}")
    return Exit.OK


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    os.umask(0o022)  # root's cluster is for other users too
    try:
        args = parser().parse_args(argv)
        if args.command == "up" and args.enforce and not args.accounting:
            raise UsageError("--enforce needs the accounting: leave --no-accounting out")
        return run(args)
    except UsageError as error:
        print(f"minicluster: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as interrupted:
        print("minicluster: interrupted", file=sys.stderr)
        return 128 + (interrupted.args[0] if interrupted.args else signal.SIGINT)
