"""The line of run.sh: of a planned run, and of one program that `python -m jobkit launch` starts.

from jobkit.launch.command import LaunchConfig, run

code = run(LaunchConfig(command=("train.py", "--lr", "0.1"), nproc_per_node=4))
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jobkit.errors import Parser, UsageError, command
from jobkit.paths import REPOSITORY, RunPaths, StudyPaths, write_json
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import PlannedRun

RUN_SH = REPOSITORY / "run.sh"

# Variables of an outer job or launcher, which this run would take for its own.
_FOREIGN: tuple[str, ...] = ("SLURM_", "SBATCH_", "SRUN_", "SCANCEL_", "SINFO_", "TORCHELASTIC_")
_FOREIGN += ("SUBMITIT_", "PMI_", "PMIX_", "OMPI_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE"}
RANK_VARIABLES |= {"LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


# --- of a planned run -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Order:
    """The runs of a launch on this machine, for the process that drives them."""

    folder: str  # of the study
    run_ids: list[str]  # in the order in which they start
    at_once: int = 1
    more: tuple[str, ...] = ()  # words for every run's run.sh
    parent: int | None = None  # end when this process is gone


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Where and how the runs of a plan are started."""

    site: str | None = None  # local, slurm, a site's name or file; None: this cluster's
    at_once: int | None = None  # concurrent runs (None: one on this machine, no limit on Slurm)
    detach: bool = False  # on this machine: continue when this process ends (Slurm jobs always do)
    only: str | None = None  # start only the runs with this status
    options: dict[str, str | bool] = field(default_factory=dict)  # for sbatch
    collect: bool = True  # on Slurm: submit a job that collects and plots after the others
    within_allocation: bool = False  # on Slurm: all runs in one allocation
    max_node_hours: float | None = None  # refuse a plan that may take more
    max_restarts: int | None = None  # resumes of a run from its checkpoint (None: run.sh's default)
    gpus_per_node: int | None = None  # on Slurm, where the site does not say
    gpu_request: str | None = None  # on Slurm: how GPUs are asked for, over the site's way
    torchrun: tuple[str, ...] = ()  # run.sh's options for torchrun, on this machine

    def local_words(self) -> tuple[str, ...]:
        """What each run's run.sh gets on this machine besides the run itself."""
        return (*restart_words(self.max_restarts), *self.torchrun)


def refuse_logs(paths: StudyPaths) -> None:
    """Raise UsageError for the folder of `collect --logs`: planned runs would never be read."""
    if paths.given_logs.exists():
        raise UsageError(f"{paths.folder} has the runs of collect --logs: give another --name")


def local_command(spec: PlannedRun, folder: Path, more: Sequence[str] = ()) -> list[str]:
    """The command of a run on this machine; more: options of run.sh itself."""
    size = ["--nproc-per-node", str(spec.world_size), *more, "--run-dir", str(folder)]
    return ["bash", str(RUN_SH), *size, *run_words(spec, str(folder))]


def job_command(
    spec: PlannedRun, paths: RunPaths, sized: bool, max_restarts: int | None = None
) -> list[str]:
    """The command of a run in its allocation; sized: in a part of a larger allocation.

    A part does not requeue the job: the process that runs the parts in turn does that.
    """
    words = ["--site-file", str(paths.site), "--run-dir", str(paths.folder)]
    words += restart_words(0 if sized else max_restarts)
    if sized:
        words += ["--nodes", str(spec.nodes), "--ntasks-per-node", str(spec.ranks_per_node)]
    return ["bash", str(RUN_SH), *words, *run_words(spec, str(paths.folder))]


def run_words(spec: PlannedRun, folder: str) -> list[str]:
    """What run.sh gets of a run's settings, or of its command with the run's folder in it."""
    return (spec.in_folder(folder) if isinstance(spec, CommandSpec) else spec).arguments()


def leave_spec(study: StudyPaths, run_id: str, spec: PlannedRun) -> None:
    """Write spec.json in the run's folder, unless the program writes it itself or it is there."""
    paths = study.run(run_id)
    if spec.writes_spec or paths.spec.exists():
        return
    paths.folder.mkdir(parents=True, exist_ok=True)
    ids = {"v": 1, "study": study.folder.name, "run_id": run_id}
    write_json(paths.spec, {**ids, "spec": spec.to_dict()})


def restart_words(max_restarts: int | None) -> list[str]:
    """run.sh's option for the number of resumes; empty for its own default."""
    return [] if max_restarts is None else ["--max-restarts", str(max_restarts)]


def shown(words: list[str]) -> str:
    """The words as one line, quoted for a shell."""
    return shlex.join(words)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an outer job or of a rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in RANK_VARIABLES and not name.startswith(_FOREIGN)
    }


def python_path() -> str:
    """PYTHONPATH with jobkit's own source first, for processes that this one starts."""
    source, before = str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")
    return source + os.pathsep + before if before else source


# --- of one program -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to start and where; None leaves run.sh's own default.

    A command whose first word ends with .py is started with JOBKIT_PYTHON, or else this process's
    Python. Several machines need node_rank and master_addr, and a call on each of them.
    """

    command: tuple[str, ...] = ()  # the program and its arguments; none: jobkit's own training
    training: tuple[str, ...] = ()  # options of jobkit's own training, where there is no command
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str | None = None
    run_dir: str | Path | None = None
    max_restarts: int | None = None
    monitor_interval: float | None = None
    start_timeout: float | None = None
    shutdown_timeout: float | None = None

    def words(self) -> list[str]:
        """The command line of run.sh. Raises UsageError for what is no command."""
        if isinstance(self.command, str) or isinstance(self.training, str):
            raise UsageError("a command is a list of words, as ('train.py', '--lr', '0.1')")
        if self.command and self.training:
            raise UsageError("give a command, or options of jobkit's own training, not both")
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in HELP}
        options = [word for name, v in values.items() if v is not None for word in (name, str(v))]
        program = [str(word) for word in self.command]
        if program and program[0].endswith(".py"):
            program = [_python(), *program]
        return [*options, *map(str, self.training), *(["--", *program] if program else [])]


HELP = {
    "nproc_per_node": "ranks on each machine (default: one per GPU, else 1)",
    "nnodes": "machines without Slurm; this command is started on each",
    "node_rank": "number of this machine, from 0",
    "master_addr": "name or address of machine 0",
    "master_port": "a free port there (29500)",
    "launcher": "srun (one process per rank), torchrun, or once (the command starts its ranks)",
    "run_dir": "the run's folder (default: a new one in logs/single/)",
    "max_restarts": "new starts after a failure or an early stop (0)",
    "monitor_interval": "seconds between torchrun's checks of the ranks (0.1)",
    "start_timeout": "seconds until all machines must have come (60)",
    "shutdown_timeout": "seconds from TERM until a rank is killed (15; under torchrun 30)",
}
assert set(HELP) == {f.name for f in fields(LaunchConfig)} - {"command", "training"}


def _python() -> str:
    """The Python of the ranks: the user's choice, as in run.sh, else this process's."""
    return os.environ.get("JOBKIT_PYTHON") or sys.executable


def run(config: LaunchConfig) -> int:
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
    """The command line of `python -m jobkit launch`."""
    parser = Parser(
        prog="jobkit launch",
        usage="jobkit launch [options] TRAIN.py [-- arguments of it]",
        description="Start a training program on this machine, or as one of several, as run.sh "
        "does. The program's own options come after --.",
        epilog="example:\n  python -m jobkit launch train.py --nproc-per-node 4 -- --lr 0.1",
    )
    for name, text in HELP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=text)
    parser.add_argument("program", nargs="?", metavar="TRAIN.py", help="the program")
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="of the program, after --")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Become run.sh, so that signals reach it and its exit code is this command's."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:end])
    if args.program is None and end + 1 >= len(words):
        raise UsageError("which program? As: jobkit launch train.py --nproc-per-node 2")
    program = [args.program] if args.program else []
    options: dict[str, Any] = {name: getattr(args, name) for name in HELP}
    config = LaunchConfig(command=(*program, *args.words, *words[end + 1 :]), **options)
    os.environ["JOBKIT_PYTHON"] = _python()
    os.execvp("bash", ["bash", str(RUN_SH), *config.words()])
