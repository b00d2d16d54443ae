"""Where a GPU check runs and what it may use; how a part of it is described."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.checks.gpu_check.expected import Measure
from jobkit.paths import REPOSITORY

_OF_A_JOB = ("SLURM_", "SBATCH_", "JOBKIT_", "TORCHELASTIC_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What may be told of the environment: names, and beginnings of names.
_TOLD: tuple[str, ...] = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
_TOLD += ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
_TOLD += ("SLURM_JOB_PARTITION", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE")
_TOLD_BEGINNINGS = ("NCCL_", "FI_", "GLOO_SOCKET_", "MIOPEN_", "PYTORCH_CUDA_ALLOC")


@dataclass(frozen=True)
class Setting:
    """Where the check runs."""

    folder: Path  # of this check: a folder for each part in it
    device: str  # cuda, or cpu for a rehearsal
    gpus: int  # 0 in a rehearsal

    @property
    def rehearsal(self) -> bool:
        """Return whether everything runs small, on the CPU."""
        return self.device == "cpu"

    @property
    def ranks(self) -> int:
        """Return the number of ranks of a part: one per GPU, two on a CPU."""
        return self.gpus or 2

    def environ(self, part: "Part", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a part's commands: nothing of a job, all files in its folder.

        An allocation is taken as one machine: its commands start their ranks with torchrun.
        """
        own = self.folder / part.name
        kept = {k: v for k, v in environ.items() if not k.startswith(_OF_A_JOB)}
        kept = {k: v for k, v in kept.items() if k not in _OF_A_RANK}
        path = [str(REPOSITORY / "src"), *filter(None, [environ.get("PYTHONPATH")])]
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "JOBKIT_PYTHON": sys.executable,
            "JOBKIT_LOGS": str(own / "logs"),
            "JOBKIT_DATA_DIR": str(self.folder / "data"),
            "JOBKIT_TEST_DEVICE": self.device,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV",
            "NCCL_DEBUG_FILE": str(own / "nccl-%h-%p.log"),
        }


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check: commands, one after the other, and what is read from their files."""

    name: str
    text: str
    limit_s: int  # for all of its commands
    commands: Callable[[Setting], Sequence[Sequence[str]]]
    read: Callable[[Path], list[Measure]] = field(default=lambda _: [])  # given its folder
    watched: bool = False  # which processes are on which GPUs is listed each second
    gpus: int = 1  # the fewest that it needs
    rehearsed: bool = True  # there is a small form of it for the CPU

    def why_not(self, setting: Setting) -> str:
        """Return why it cannot run here; empty where it can."""
        if setting.rehearsal:
            return "" if self.rehearsed else "takes minutes on a CPU: not part of a rehearsal"
        return "" if setting.gpus >= self.gpus else f"needs {self.gpus} GPUs, {setting.gpus} here"


def told(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those variables that a report may show, by an allow-list: no other one is read."""
    names = [n for n in sorted(environ) if n in _TOLD or n.startswith(_TOLD_BEGINNINGS)]
    return {name: environ[name] for name in names}
