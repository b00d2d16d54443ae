"""The launch line of a run and the environment that it starts in: pure text, no effects."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.paths import REPOSITORY, RunPaths, StudyPaths, write_json
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import PlannedRun

RUN_SH = REPOSITORY / "run.sh"

# Variables of an outer job or launcher, which this run would take for its own.
_FOREIGN = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SCANCEL_",
    "SINFO_",
    "TORCHELASTIC_",
    "SUBMITIT_",
    "PMI_",
    "PMIX_",
    "OMPI_",
)
RANK_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


@dataclass(frozen=True, kw_only=True)
class Order:
    """The runs of a launch on this machine, for the process that drives them."""

    folder: str  # of the study
    run_ids: list[str]  # in the order in which they start
    at_once: int = 1
    more: tuple[str, ...] = ()  # words for every run's run.sh
    parent: int | None = None  # end when this process is gone


def local_command(spec: PlannedRun, folder: Path, more: Sequence[str] = ()) -> list[str]:
    """The command of a run on this machine; more: options of run.sh itself."""
    size = ["--nproc-per-node", str(spec.world_size)]
    return [
        "bash",
        str(RUN_SH),
        *size,
        *more,
        "--run-dir",
        str(folder),
        *run_words(spec, str(folder)),
    ]


def job_command(
    spec: PlannedRun, paths: RunPaths, sized: bool, max_restarts: int | None = None
) -> list[str]:
    """The command of a run in its allocation; sized: in a part of a larger allocation.

    A part does not requeue the job: the process that runs the parts in turn does that.
    """
    part = ["--nodes", str(spec.nodes), "--ntasks-per-node", str(spec.ranks_per_node)]
    own = ["--site-file", str(paths.site), "--run-dir", str(paths.folder)]
    restarts = restart_words(0 if sized else max_restarts)
    return [
        "bash",
        str(RUN_SH),
        *own,
        *restarts,
        *(part if sized else []),
        *run_words(spec, str(paths.folder)),
    ]


def run_words(spec: PlannedRun, folder: str) -> list[str]:
    """What run.sh gets of a run's settings, or of its command with the run's folder in it."""
    return (spec.in_folder(folder) if isinstance(spec, CommandSpec) else spec).arguments()


def leave_spec(study: StudyPaths, run_id: str, spec: PlannedRun) -> None:
    """Write spec.json in the run's folder, unless the program writes it itself or it is there."""
    paths = study.run(run_id)
    if spec.writes_spec or paths.spec.exists():
        return
    paths.folder.mkdir(parents=True, exist_ok=True)
    own = {"v": 1, "study": study.folder.name, "run_id": run_id, "spec": spec.to_dict()}
    write_json(paths.spec, own)


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
    own, given = str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")
    return own + os.pathsep + given if given else own
