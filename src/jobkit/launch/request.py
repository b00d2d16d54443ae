"""How: the settings of a launch."""

from dataclasses import dataclass, field

from jobkit.launch.command import restart_words


@dataclass(frozen=True, kw_only=True)
class How:
    """How a plan is launched."""

    site: str | None = None  # local, slurm, a profile's name or file; None: found
    at_once: int | None = None  # runs at one time (None: one here, any number on Slurm)
    detach: bool = False  # here: live on when this process ends (on Slurm jobs always do)
    only: str | None = None  # start only the runs with this status
    options: dict[str, str | bool] = field(default_factory=dict)  # for sbatch
    collect: bool = True  # on Slurm: a job that collects and plots follows
    within_allocation: bool = False  # on Slurm: all runs in one allocation
    max_node_hours: float | None = None  # refuse a plan that may take more
    max_restarts: int | None = None  # how often a run goes on (None: run.sh's own default)
    torchrun: tuple[str, ...] = ()  # run.sh's words for torchrun, on this machine

    def local_words(self) -> tuple[str, ...]:
        """What each run's run.sh gets on this machine beside the run itself."""
        return (*restart_words(self.max_restarts), *self.torchrun)
