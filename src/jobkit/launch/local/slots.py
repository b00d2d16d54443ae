"""GPUs of their own for the runs that are at work at a time on this machine (--max-running)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jobkit.gpus import lendable_gpus
from jobkit.spec.runspec import PlannedRun


@dataclass
class Slots:
    """The GPUs that are lent to nobody, and the variable that shows a run its own."""

    variable: str = ""  # empty: there is nothing to lend
    gpus: tuple[str, ...] = ()  # all of them, in order
    _lent: set[str] = field(default_factory=set)

    @classmethod
    def for_runs(
        cls, runs: Iterable[PlannedRun], at_once: int, environ: Mapping[str, str]
    ) -> "Slots":
        """Those of this machine; none where runs do not overlap, or all compute on the CPU."""
        if at_once == 1 or all(run.planned_device == "cpu" for run in runs):
            return cls()
        variable, gpus = lendable_gpus(environ)
        return cls(variable, tuple(gpus))

    def lend(self, run: PlannedRun) -> dict[str, str] | None:
        """Lend a run its GPUs: what its environment gets. None: too few of them are free now."""
        wanted = gpus_for(run, len(self.gpus))
        if not wanted:
            return {}
        free = [gpu for gpu in self.gpus if gpu not in self._lent]
        if len(free) < wanted:
            return None
        self._lent.update(free[:wanted])
        return {self.variable: ",".join(free[:wanted])}

    def take_back(self, lent: Mapping[str, str]) -> None:
        """Take back what lend gave, as the run has ended."""
        self._lent.difference_update(*(gpus.split(",") for gpus in lent.values()))


def gpus_for(run: PlannedRun, there: int) -> int:
    """How many of the GPUs that are there a run gets: one for each rank, all for dp.

    With too few for its ranks a run of --device auto computes on the CPU, after a warning, which
    it can give only if it sees a GPU: it gets all there are, as a program that decides itself does.
    """
    if run.planned_device == "cpu":
        return 0
    return there if run.whole_node else min(run.world_size, there)
