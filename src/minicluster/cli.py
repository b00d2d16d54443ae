"""The commands of `hpc/minicluster`: parse, call, and report what was done."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable

from minicluster import cluster, machine, network, state
from minicluster.config import Options
from minicluster.layout import (
    DIR_VARIABLE,
    ClusterError,
    Layout,
    UsageError,
    check_root,
    default_root,
)
from minicluster.state import State

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

  hpc/minicluster up --no-accounting        starts in a second; no sacct
  hpc/minicluster up --preemption           partition `urgent` preempts jobs of `batch`
  sudo hpc/minicluster up --netns           each node with its own address and host name
  sudo hpc/minicluster link cut n2          take a node's link down; also: slow n2 10mbit, heal
  hpc/minicluster kill n2 --jobs            power loss of a node; kill n2: only its slurmd
  hpc/minicluster start n2                  restart its slurmd; likewise slurmctld
  hpc/minicluster up --memory-limits        jobs over their --mem are killed
  hpc/minicluster up --dir /tmp/second      a second cluster beside the first

exit codes: 0 ok; 1 failed, or a daemon does not run; 2 wrong usage, or missing packages
"""
_FIRST_STEP = (
    "srun --nodes=2 --ntasks-per-node=2 --gpus-per-task=1 "
    "sh -c 'echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
)


class _Parser(argparse.ArgumentParser):
    """One line to stderr for a wrong command line, and exit 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see: {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="hpc/minicluster",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = _command(commands, "up", _up, "start a cluster; returns when all nodes are idle")
    _add_options(up)
    _command(
        commands,
        "status",
        _status,
        "state of nodes and daemons; exit code 1 if a daemon does not run",
    )
    _command(commands, "env", _env, 'shell lines for eval "$(hpc/minicluster env)"')
    _command(commands, "down", _down, "end the cluster and delete its folder")
    link = _command(commands, "link", _link, "cut, slow or heal links of nodes (--netns)")
    link.add_argument("action", choices=["cut", "slow", "heal"])
    link.add_argument(
        "words", nargs="*", metavar="NODE|RATE", help="cut n2; cut n1 n2; slow n2 10mbit; heal [n2]"
    )
    kill = _command(commands, "kill", _kill, "SIGKILL a node's slurmd, or slurmctld")
    kill.add_argument("name", metavar="NODE|slurmctld")
    kill.add_argument(
        "--jobs", action="store_true", help="also kill all other processes on the node"
    )
    start = _command(commands, "start", _start, "restart a killed slurmd or slurmctld")
    start.add_argument("name", metavar="NODE|slurmctld")
    return top


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    made.set_defaults(function=function)
    made.add_argument(
        "--dir",
        metavar="DIR",
        help=f"the cluster's folder (default: ${DIR_VARIABLE}, else {default_root()})",
    )
    return made


def _add_options(up: argparse.ArgumentParser) -> None:
    usual = Options()
    for name, value, text in (
        ("nodes", usual.nodes, "nodes, n1 to nN"),
        ("cores", usual.cores, "cores of each node, simulated"),
        ("gpus", usual.gpus, "GPUs of each node, simulated"),
        ("memory", usual.memory_mib, "memory of each node in MiB, simulated"),
    ):
        up.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
        )
    ports = "first of its 400 ports (default: free)"
    up.add_argument("--port", type=int, metavar="P", help=ports)
    for name, text in (
        ("no-accounting", "no slurmdbd, no MariaDB, no sacct; faster"),
        ("preemption", "add a partition, urgent, whose jobs preempt (requeue) those of batch"),
        ("netns", "each node in a network namespace (needs root)"),
        ("memory-limits", "kill jobs that use more than their --mem"),
        ("enforce", "jobs need an account and a QOS that exist in the accounting"),
    ):
        up.add_argument(f"--{name}", action="store_true", help=text)


def _layout(arguments: argparse.Namespace) -> Layout:
    return Layout(check_root(arguments.dir if arguments.dir is not None else default_root()))


def _say(text: str) -> None:
    print(text, flush=True)


def _command_line(layout: Layout, command: str) -> str:
    """The command line for this cluster, as the user would type it.

    After `sudo hpc/minicluster up` the user's shell has another default folder than root's.
    """
    by_sudo = "SUDO_UID" in os.environ
    usual = layout.root == check_root(default_root()) and not by_sudo
    sudo = "sudo " if by_sudo and command not in ("env", "status") else ""
    return f"{sudo}hpc/minicluster {command}" + ("" if usual else f" --dir {layout.root}")


def _up(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments)
    options = Options(
        nodes=arguments.nodes,
        cores=arguments.cores,
        gpus=arguments.gpus,
        memory_mib=arguments.memory,
        accounting=not arguments.no_accounting,
        preemption=arguments.preemption,
        netns=arguments.netns,
        memory_limits=arguments.memory_limits,
        enforce=arguments.enforce,
    )
    start = time.monotonic()
    current, how = cluster.up(layout, options, arguments.port, _say)
    took = time.monotonic() - start
    _say(_summary(layout, current, how, took))
    return 0


def _summary(layout: Layout, current: State, how: str, took_s: float) -> str:
    options = current.options
    parts = f"{options.cores} cores, {options.gpus} GPUs, {options.memory_mib} MiB"
    first = f"up: {options.node_range} idle, each {parts}; ports from {current.base_port}"
    if how == "was up":
        lines = [f"{first}; it was up already"]
    else:
        lines = [f"{first}; {took_s:.1f} s"]
    lines += [f"note: {note}" for note in current.notes]
    lines += [
        "next:",
        f'  eval "$({_command_line(layout, "env")})"',
        "  sinfo",
        f"  {_FIRST_STEP}",
    ]
    if options.netns:
        lines.append(f"  {_command_line(layout, 'link cut n1')}")
    lines.append(f"  {_command_line(layout, 'down')}")
    return "\n".join(lines)


def _status(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments)
    current = state.running(layout, reading=True)
    dead = current.dead()
    # Slurm's commands try for ten seconds and more to reach a daemon that is gone.
    shown = {} if dead else machine.node_states(layout)
    _say(f"folder: {layout.root}")
    for name in current.options.node_names:
        _say(f"{name}: {shown.get(name, 'unknown')}")
    for fault in current.faults:
        _say(f"link: {fault}")
    for note in current.notes:
        _say(f"note: {note}")
    if not dead:
        _say("daemons: all running")
        return 0
    _say(
        f"daemons not running: {', '.join(dead)}; restart a node or slurmctld: "
        f"{_command_line(layout, 'start')} NAME; start from scratch: {_command_line(layout, 'up')}"
    )
    return 1


def _env(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments)
    state.running(layout, reading=True)
    for name, value in machine.exports(layout).items():
        _say(f"export {name}={shlex.quote(value)}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments)
    there = cluster.down(layout)
    _say(f"down: {layout.root}" if there else f"no cluster in {layout.root}")
    return 0


def _link(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments)
    for line in network.change(layout, arguments.action, arguments.words):
        _say(line)
    return 0


def _kill(arguments: argparse.Namespace) -> int:
    _say(cluster.kill(_layout(arguments), arguments.name, arguments.jobs))
    return 0


def _start(arguments: argparse.Namespace) -> int:
    _say(cluster.start(_layout(arguments), arguments.name, _say))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        arguments = parser().parse_args(argv)
        code: int = arguments.function(arguments)
        return code
    except ClusterError as error:
        print(f"minicluster: error: {error}", file=sys.stderr)
        return error.code
    except cluster.Interrupted as interrupted:
        print("minicluster: interrupted; the cluster was removed", file=sys.stderr)
        return 128 + interrupted.signum
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        return 0
