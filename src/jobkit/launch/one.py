"""One run from Python or with `python -m jobkit launch`: the line of run.sh, and its exit code.

from jobkit.launch.one import LaunchConfig, launch

code = launch(LaunchConfig(command=("train.py", "--lr", "0.1"), nproc_per_node=4))
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import Parser, UsageError, command
from jobkit.launch.command import RUN_SH


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to start and where; None leaves run.sh's own default.

    A command whose first word ends with .py is started with JOBKIT_PYTHON, or else this process's
    Python. Several nodes need node_rank and master_addr, and a call on each of them.
    """

    command: tuple[str, ...] = ()  # the program and its arguments; none: jobkit's own training
    training: tuple[str, ...] = ()  # options of jobkit's own training, where there is no command
    nproc_per_node: int | None = None  # ranks on each machine
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str | None = None  # srun, torchrun or once
    run_dir: str | Path | None = None
    max_restarts: int | None = None
    monitor_interval: float | None = None  # seconds
    start_timeout: float | None = None  # seconds
    shutdown_timeout: float | None = None  # seconds

    def words(self) -> list[str]:
        """The command line of run.sh. Raises UsageError for what is no command."""
        if isinstance(self.command, str) or isinstance(self.training, str):
            raise UsageError("a command is a list of words, as ('train.py', '--lr', '0.1')")
        if self.command and self.training:
            raise UsageError("give a command, or options of jobkit's own training, not both")
        own = [
            word
            for name in OPTIONS
            if (value := getattr(self, name)) is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        program = [str(word) for word in self.command]
        if program and program[0].endswith(".py"):
            program = [_python(), *program]
        return [*own, *map(str, self.training), *(["--", *program] if program else [])]


OPTIONS = {
    "nproc_per_node": ("N", "ranks on this machine (default: one per GPU, else 1)"),
    "nnodes": ("N", "machines of the run; the command is started on each of them"),
    "node_rank": ("K", "this machine's number, from 0"),
    "master_addr": ("HOST", "host name or address of machine 0"),
    "master_port": ("P", "port at which machine 0 listens (default 29500)"),
    "launcher": ("NAME", "srun (default; one process per rank), torchrun, or once (one process)"),
    "run_dir": ("DIR", "the run's folder (default: a new one in logs/single/)"),
    "max_restarts": ("N", "how often the run is started again after it failed (default 0)"),
    "monitor_interval": ("S", "seconds between two checks of the ranks (default 0.1)"),
    "start_timeout": ("S", "seconds until all machines must have come (default 60)"),
    "shutdown_timeout": ("S", "seconds from TERM until a rank is killed (default 15)"),
}


def _python() -> str:
    """The Python of the ranks: the user's choice, as in run.sh, else this process's."""
    return os.environ.get("JOBKIT_PYTHON") or sys.executable


def launch(config: LaunchConfig) -> int:
    """Run it to its end; return the exit code of run.sh. Raises UsageError for bad input."""
    words, env = ["bash", str(RUN_SH), *config.words()], {**os.environ, "JOBKIT_PYTHON": _python()}
    process = subprocess.Popen(words, env=env)
    while True:
        try:
            code = process.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:  # Ctrl-C reaches run.sh too, which ends its ranks
            continue


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="jobkit launch",
        usage="jobkit launch [options] TRAIN.py [-- arguments of it]",
        description="Start a training program on this machine, or as one of several, as run.sh "
        "does. The program's own options come after --.",
        epilog="example:\n  python -m jobkit launch train.py --nproc-per-node 4 -- --lr 0.1",
    )
    for name, (value, text) in OPTIONS.items():
        made.add_argument(f"--{name.replace('_', '-')}", metavar=value, help=text)
    made.add_argument("program", nargs="?", metavar="TRAIN.py", help="the program, on each rank")
    made.add_argument("words", nargs="*", metavar="ARGUMENT", help="of the program, after --")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Become run.sh, so that signals reach it and its exit code is this command's."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser().parse_args(given[:end])
    if args.program is None and end + 1 >= len(given):
        raise UsageError("which program? As: jobkit launch train.py --nproc-per-node 2")
    program = [args.program] if args.program else []
    own = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    config = LaunchConfig(command=(*program, *args.words, *given[end + 1 :]), **own)
    os.environ["JOBKIT_PYTHON"] = _python()
    os.execvp("bash", ["bash", str(RUN_SH), *config.words()])
