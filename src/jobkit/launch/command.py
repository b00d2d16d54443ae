"""The line of run.sh: of a planned run, and of one program that Python starts (LaunchConfig)."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.paths import REPOSITORY, RunPaths, StudyPaths, write_json
from jobkit.spec.command import RUN_DIR, CommandSpec, PlannedRun

RUN_SH = REPOSITORY / "run.sh"

# Variables of an outer job or launcher, which this run would take for its own.
_FOREIGN: tuple[str, ...] = ("SLURM_", "SBATCH_", "SRUN_", "SCANCEL_", "SINFO_", "TORCHELASTIC_")
_FOREIGN += ("SUBMITIT_", "PMI_", "PMIX_", "OMPI_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE"}
RANK_VARIABLES |= {"LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Where and how the runs of a plan are started."""

    site: str | None = None  # local, slurm, a site's name or file; None: this cluster's
    at_once: int | None = None  # on Slurm: concurrent runs of each size (None: all); here it is one
    detach: bool = False  # on this machine: continue when this process ends (Slurm jobs always do)
    options: dict[str, str | bool] = field(default_factory=dict)  # for sbatch
    within_allocation: bool = False  # on Slurm: all runs in one allocation
    max_restarts: int | None = None  # resumes of a run from its checkpoint (None: run.sh's default)
    gpus_per_node: int | None = None  # on Slurm, where the site does not say
    gpu_request: str | None = None  # on Slurm: how GPUs are asked for, over the site's way


def refuse_logs(paths: StudyPaths) -> None:
    """Raise UsageError for the folder of `collect --logs`: planned runs would never be read."""
    if paths.given_logs.exists():
        raise UsageError(f"{paths.folder} has the runs of collect --logs: give another --name")


def local_command(spec: PlannedRun, folder: Path, max_restarts: int | None = None) -> list[str]:
    """The command of a run on this machine."""
    words = ["--nproc-per-node", str(spec.world_size), *_restart_words(max_restarts)]
    return ["bash", str(RUN_SH), *words, "--run-dir", str(folder), *run_words(spec, str(folder))]


def job_command(
    spec: PlannedRun, paths: RunPaths, sized: bool, max_restarts: int | None = None
) -> list[str]:
    """The command of a run in its allocation; sized: in a part of a larger allocation."""
    words = ["--site-file", str(paths.site), "--run-dir", str(paths.folder)]
    words += _restart_words(max_restarts)
    if sized:
        words += ["--nodes", str(spec.nodes), "--ntasks-per-node", str(spec.ranks_per_node)]
    return ["bash", str(RUN_SH), *words, *run_words(spec, str(paths.folder))]


def run_words(spec: PlannedRun, folder: str) -> list[str]:
    """What run.sh gets of a run's settings, or of its command with the run's folder in it."""
    words = spec.arguments()
    return [w.replace(RUN_DIR, folder) for w in words] if isinstance(spec, CommandSpec) else words


def _restart_words(max_restarts: int | None) -> list[str]:
    return [] if max_restarts is None else ["--max-restarts", str(max_restarts)]


def leave_spec(paths: RunPaths, spec: PlannedRun) -> None:
    """Write spec.json in the run's folder, unless the program writes it itself or it is there."""
    if isinstance(spec, CommandSpec) and not paths.spec.exists():
        paths.folder.mkdir(parents=True, exist_ok=True)
        ids = {"v": 1, "study": paths.folder.parent.name, "run_id": paths.folder.name}
        where = {"script": str(Path(spec.script).absolute())} if spec.script else {}
        write_json(paths.spec, {**ids, **where, "spec": spec.to_dict()})


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


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """A program, and the options with which run.sh starts it here; None: run.sh's own default.

    A command whose first word ends with .py is started with JOBKIT_PYTHON, or else this process's
    Python. Several machines need node_rank, master_addr and run_dir, and a call on each.
    """

    command: tuple[str, ...]  # the program and its arguments
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str | None = None
    run_dir: str | None = None
    max_restarts: int | None = None
    start_timeout: int | None = None
    shutdown_timeout: int | None = None

    def line(self) -> list[str]:
        """The command line of run.sh. Raises UsageError for what is no command."""
        if not self.command or isinstance(self.command, str):
            raise UsageError("a command is a list of words, as ('train.py', '--lr', '0.1')")
        words = []
        for name, value in vars(self).items():
            if name != "command" and value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        python = [os.environ.get("JOBKIT_PYTHON") or sys.executable]
        program = [str(word) for word in self.command]
        program[:0] = python * program[0].endswith(".py")
        return ["bash", str(RUN_SH), *words, "--", *program]


def run(config: LaunchConfig) -> int:
    """Run it to its end; return the exit code of run.sh. Raises UsageError for bad input."""
    env = {**os.environ, "JOBKIT_PYTHON": os.environ.get("JOBKIT_PYTHON") or sys.executable}
    process = subprocess.Popen(config.line(), env=env)
    while True:
        try:
            code = process.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:  # Ctrl-C reaches run.sh too, which ends its ranks
            continue
