"""One run from Python or with `python -m jobkit launch`: the line of run.sh, and its exit code.

from jobkit import LaunchConfig, launch

code = launch(LaunchConfig(command=("train.py", "--lr", "0.1"), nproc_per_node=4))
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from jobkit.errors import Parser, UsageError, command
from jobkit.launch.command import RUN_SH

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


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


OPTIONS = tuple(
    name for name in LaunchConfig.__dataclass_fields__ if name not in ("command", "training")
)


def _python() -> str:
    """The Python of the ranks: the user's choice, as in run.sh, else this process's."""
    return os.environ.get("JOBKIT_PYTHON") or sys.executable


def launch(config: LaunchConfig) -> int:
    """Run it to its end; return the exit code of run.sh. Raises UsageError for bad input.

    Called from the main thread, it hands HUP, INT, TERM, USR1 and USR2 on to run.sh.
    """
    words, env = ["bash", str(RUN_SH), *config.words()], {**os.environ, "JOBKIT_PYTHON": _python()}
    if threading.current_thread() is not threading.main_thread():  # no other gets signals
        return _code(subprocess.Popen(words, env=env).wait())
    heard: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def tell() -> None:
        with contextlib.suppress(IndexError):  # nothing is left, or a signal came in between
            while started:
                started[0].send_signal(heard.pop(0))

    def hand_on(signum: int, _frame: FrameType | None) -> None:
        heard.append(signum)
        tell()

    # What the caller ignores stays ignored, as under nohup; a handler of C code (None) cannot be
    # put back.
    taken = [s for s in _SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {signum: signal.signal(signum, hand_on) for signum in taken}
    try:
        # A session of its own: Ctrl-C reaches this process only, so that run.sh gets it once.
        started.append(subprocess.Popen(words, env=env, start_new_session=True))
        tell()
        return _code(started[0].wait())
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _code(code: int) -> int:
    return 128 - code if code < 0 else code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="jobkit launch",
        usage="jobkit launch [options] TRAIN.py [-- arguments of it]",
        description="Start a training program on this machine, or as one of several, as run.sh "
        "does. The program's own options come after --.",
        epilog="example:\n  python -m jobkit launch train.py --nproc-per-node 4 -- --lr 0.1",
    )
    for name in OPTIONS:
        made.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE")
    made.add_argument("program", nargs="?", metavar="TRAIN.py")
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
