"""Submits what Slurm did not take at first, as jobs end: a study may be larger than its limit."""

import time
from collections.abc import Sequence

from jobkit.errors import UsageError
from jobkit.launch import lock
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import options
from jobkit.launch.slurm.jobs import SlurmRuns, start
from jobkit.launch.states import States
from jobkit.outcome.status import UNDER_WAY
from jobkit.permissions import closed_to_others
from jobkit.spec.plan import Plan

AGAIN_S = 10.0  # between two tries
# Slurm counts jobs for some time after their runs have ended; then it refuses for other reasons.
GIVE_UP_S = 300.0


class Rest:
    """The jobs of a launch, the runs that Slurm has not taken yet, and when to try them again."""

    def __init__(self, plan: Plan, site: Site, request: LaunchRequest) -> None:
        self.runs: SlurmRuns | None = None
        self.left: tuple[str, ...] = ()
        self._plan, self._site, self._request = plan, site, request
        self._taken: set[str] = set()
        self._active: int | None = None  # runs of the study that waited or ran after the last try
        self._again = 0.0
        self._ended: float | None = None  # since when no run of the study waits or runs

    def submit(self, run_ids: Sequence[str], states: States) -> str:
        """Submit the runs, or as many as Slurm takes; return a note of what failed."""
        wanted = options.submission(self._plan, run_ids, self._site, self._request)
        active = [r for r, state in states.found.items() if state.status in UNDER_WAY]
        jobs = {states.jobs[r].job_id.split("_")[0] for r in active if r in states.jobs}
        later, note = start(wanted, self._request.collect, sorted(jobs), full=bool(active))
        self.runs = self.runs.and_later(later) if self.runs else later
        self.left = later.left
        self._taken |= {*run_ids} - {*self.left}
        return note

    def go_on(self, states: States) -> str:
        """Submit what is left, if jobs have ended since the last try; return what to tell of it.

        It ends where no run waits or runs for GIVE_UP_S: then there is another reason, or other
        jobs have all the places.
        """
        now, before = time.monotonic(), len(self.left)
        active = sum(state.status in UNDER_WAY for state in states.found.values())
        if self._active is None:
            self._active = active
        if now < self._again or (active and active >= self._active):
            return ""
        self._ended = None if active else self._ended or now
        self._active, self._again = None, now + AGAIN_S
        if any(states.found[run_id].status == "cancelled" for run_id in self._taken):
            self.left = ()
            return f"{before} runs are not submitted: others were cancelled"
        try:
            note = self._submit_left(states)
        except UsageError as error:
            note = f"{before} runs are not submitted: {error}"
        if len(self.left) < before:
            more = f", {len(self.left)} are left" if self.left else ""
            return f"{before - len(self.left)} more runs are submitted{more}"
        if self._ended is None or now < self._ended + GIVE_UP_S:
            return ""
        self.left = ()
        return note

    @closed_to_others()
    def _submit_left(self, states: States) -> str:
        """Submit what is left; return a note of what failed.

        Raises UsageError where Slurm refuses, or another launcher submits.
        """
        with lock.held(self._plan.paths):
            states.forget(self.left)
            found = states.look(fresh=True)
            # Another launcher may have submitted some of them.
            waiting = [r for r in self.left if found[r].status not in ("ok", *UNDER_WAY)]
            if not waiting:
                self.left = ()
                return ""
            note = self.submit(waiting, states)
            states.forget(waiting)
        return note
