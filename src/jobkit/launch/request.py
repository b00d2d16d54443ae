"""The settings of a launch."""

from dataclasses import dataclass, field, replace

from jobkit.errors import UsageError
from jobkit.launch.command import restart_words
from jobkit.launch.site import Site
from jobkit.paths import StudyPaths


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Where and how the runs of a plan are started."""

    site: str | None = None  # local, slurm, a site's name or file; None: found
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

    def on(self, site: Site, of_study: int | None = None) -> Site:
        """The site with what was said of its GPUs; of_study: the study's gpus_per_node."""
        number = site.gpus_per_node or self.gpus_per_node or of_study
        way = self.gpu_request or site.gpu_request
        return replace(site, gpus_per_node=number, gpu_request=way)

    def local_words(self) -> tuple[str, ...]:
        """What each run's run.sh gets on this machine besides the run itself."""
        return (*restart_words(self.max_restarts), *self.torchrun)


def refuse_logs(paths: StudyPaths) -> None:
    """Raise UsageError for the folder of `collect --logs`: planned runs would never be read."""
    if paths.given_logs.exists():
        raise UsageError(f"{paths.folder} has the runs of collect --logs: give another --name")
