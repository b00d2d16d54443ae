"""The current states of a plan's runs, from their files and, for jobs, from Slurm."""

import time
from collections.abc import Iterable, Mapping

from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import FINAL, UNDER_WAY, RunState, join, ordered_runs
from jobkit.spec.study import Plan

SQUEUE_EVERY_S, SACCT_EVERY_S = 5.0, 30.0  # both are shared by all users of a cluster


class States:
    """Reads the states repeatedly: ended runs only once, Slurm at a limited rate."""

    def __init__(self, plan: Plan, ask: bool = True) -> None:
        """ask: whether Slurm may be queried."""
        self.plan = plan
        self.found: dict[str, RunState] = {}
        self._may_ask = ask
        self._cluster: str | None = None  # the name of the one that is asked, once it is known
        self._next = {"squeue": 0.0, "sacct": 0.0}  # when each may be asked again
        self.jobs: dict[str, slurm_jobs.Job] = {}  # by run: what Slurm last said of its job
        self._answers: dict[str, slurm_jobs.Job] = {}

    def look(self, fresh: bool = False) -> dict[str, RunState]:
        """Return the state of each planned run. fresh: query Slurm in any case."""
        if fresh:
            self._next = dict.fromkeys(self._next, 0.0)
        paths = self.plan.paths
        open_runs = {r: paths.run(r) for r in self.plan.runs if not self._ended(r)}
        ordered = ordered_runs(paths, open_runs)
        joined = join(open_runs, ordered, self._ask, all_jobs=False, here=self._here)
        self.found |= joined.states
        self.jobs |= joined.jobs
        return {run_id: self.found[run_id] for run_id in self.plan.runs}

    def _ended(self, run_id: str) -> bool:
        return run_id in self.found and self.found[run_id].status in FINAL

    def _here(self) -> str | None:
        """The name of the cluster that is asked; asked again until it has answered."""
        if self._may_ask and self._cluster is None:
            self._cluster = slurm_jobs.cluster()
        return self._cluster

    def _ask(self, ids: Iterable[str]) -> Mapping[str, slurm_jobs.Job]:
        """Return Slurm's latest answers; query it again after the interval, if allowed."""
        now = time.monotonic()
        if self._may_ask and now >= self._next["squeue"]:
            accounting = now >= self._next["sacct"]
            self._answers |= slurm_jobs.ask(ids, accounting)
            self._next["squeue"] = now + SQUEUE_EVERY_S
            if accounting:
                self._next["sacct"] = now + SACCT_EVERY_S
        return self._answers


def states(plan: Plan) -> dict[str, RunState]:
    """Return the current state of each planned run."""
    return States(plan).look()


def select(found: Mapping[str, RunState], only: str | None = None) -> list[str]:
    """Return the runs to start: those missing or not ok, or only those with one status."""
    if only:
        return [r for r, state in found.items() if state.status == only]
    return [r for r, state in found.items() if state.status not in ("ok", *UNDER_WAY)]
