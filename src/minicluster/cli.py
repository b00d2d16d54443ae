"""The commands of `hpc/minicluster`: parse, call, and report what was done."""

import argparse
import os
import shlex
import signal
import sys
import time

from jobkit.errors import Exit, NotStarted, Parser, UsageError, at_least
from minicluster import cluster as clusters
from minicluster import machine
from minicluster.config import MAX_NODES, Cluster

DESCRIPTION = """\
A real Slurm with several simulated nodes on this machine: to learn Slurm, to try a batch script
before it costs node-hours, and for tests. Jobs are real processes; GPUs are only counted.
"""
EXAMPLES = """\
examples:
  hpc/minicluster up                        4 nodes of 64 cores and 4 GPUs, with accounting
  eval "$(hpc/minicluster env)"             point sbatch, srun, squeue, ... at it in this shell
  sbatch --nodes=2 run.sh                   submit jobs as on any cluster
  hpc/minicluster down                      end the cluster and remove all its files

  export JOBKIT_MINICLUSTER_DIR=/tmp/second; hpc/minicluster up     beside the first one

exit codes: 0 ok; 1 failed; 2 wrong usage, or missing packages
"""
COMMANDS = {
    "up": "start a cluster; returns when all nodes are idle",
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
    new = {name: commands.add_parser(name, help=t, description=t) for name, t in COMMANDS.items()}
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    os.umask(0o022)  # root's cluster is for other users too
    try:
        args = parser().parse_args(argv)
        if args.command == "up" and args.enforce and not args.accounting:
            raise UsageError("--enforce needs the accounting: leave --no-accounting out")
        root, begin = clusters.folder_of(), time.monotonic()
        match args.command:
            case "up":
                asked = {name: value for name, value in vars(args).items() if name != "command"}
                cluster = clusters.up(
                    Cluster(root=root, **asked), lambda text: print(text, flush=True)
                )
                parts = f"{cluster.cores} cores, {cluster.gpus} GPUs, {cluster.memory_mib} MiB"
                took_s = time.monotonic() - begin
                print(f"up: {cluster.node_range} idle, each {parts}; {took_s:.1f} s")
                env = f"{machine.DIR_VARIABLE}={root} hpc/minicluster env"
                print(f'next:\n  eval "$({env})"\n  sinfo\n  {_FIRST_STEP}')
                print("  hpc/minicluster down")
            case "env":
                clusters.check_folder(root, reading=True)
                if Cluster.load(root) is None:
                    raise NotStarted(f"no cluster is up in {root}; start one: hpc/minicluster up")
                for name, value in machine.exports(root).items():
                    print(f"export {name}={shlex.quote(value)}")
            case "down":
                print(f"down: {root}" if clusters.down(root) else f"no cluster in {root}")
        return Exit.OK
    except UsageError as error:
        print(f"minicluster: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as interrupted:
        print("minicluster: interrupted", file=sys.stderr)
        return 128 + (interrupted.args[0] if interrupted.args else signal.SIGINT)
