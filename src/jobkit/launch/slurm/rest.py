"""Submits what Slurm did not take at first, as jobs end: a study may be larger than its limit.

The job that collects counts against the limit too: where it alone was refused, it is tried again.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from jobkit.errors import UsageError
from jobkit.launch import lock
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import options
from jobkit.launch.slurm.jobs import SlurmRuns, collect_after, start
from jobkit.launch.slurm.submit import at_limit
from jobkit.launch.states import States, hold_places
from jobkit.outcome.facts import read_job
from jobkit.outcome.status import UNDER_WAY
from jobkit.permissions import closed_to_others
from jobkit.spec.plan import Plan

# Between two tries. Slurm counts a job for some time after its run has ended: where a try is
# refused and no other run has ended, the next comes after twice the time, at most the second one.
AGAIN_S, AGAIN_AT_LAST_S = 10.0, 60.0
# With none of the study's jobs at work, Slurm then refuses for other reasons.
GIVE_UP_S = 300.0


class Rest:
    """The jobs of a launch, the runs that Slurm has not taken yet, and when to try them again."""

    def __init__(self, plan: Plan, site: Site, request: LaunchRequest) -> None:
        self.runs: SlurmRuns | None = None
        self.left: tuple[str, ...] = ()
        self._plan, self._site, self._request = plan, site, request
        self._taken: set[str] = set()
        self._watched: set[str] = set()  # with those of earlier launches: was one cancelled?
        self._starts: dict[str, tuple[object, object]] = {}  # of what is left: its newest start
        # Runs of the study that waited or ran after Slurm last took some: below it, a place may be
        # free. Before, it is not known how many places there are.
        self._active: float = math.inf
        self._pause_s, self._tried = AGAIN_S, -math.inf
        self._seen: float = math.inf  # how many waited or ran at the last try
        self._ended: float | None = None  # since when no run of the study waits or runs

    def submit(self, run_ids: Sequence[str], states: States) -> str:
        """Submit the runs, or as many as Slurm takes; return a note of what failed."""
        wanted = options.submission(self._plan, run_ids, self._site, self._request)
        active = [r for r, state in states.found.items() if state.status in UNDER_WAY]
        jobs = {states.jobs[r].job_id.split("_")[0] for r in active if r in states.jobs}
        full = hold_places(self._plan, states.found)
        later, note = start(wanted, self._request.collect, sorted(jobs), full)
        if later.left and not self.runs and self._request.at_once:
            note += "; --max-running applies to each job array, also to those submitted later"
        self.runs = self.runs.and_later(later) if self.runs else later
        self.left = later.left
        self._starts = {run_id: self._start(run_id) for run_id in self.left}
        if taken := {*run_ids} - {*self.left}:
            self._taken |= taken
            self._active = len(active) + len(taken)
        self._watched |= taken.union(active)
        return note

    @property
    def waits(self) -> bool:
        """Whether Slurm is to be tried again: for runs, or for the job that collects."""
        return bool(self.left or (self.runs and self.runs.collect_left))

    def give_up(self) -> None:
        """Try no more."""
        self.left = ()
        if self.runs:
            self.runs = replace(self.runs, collect_left=False)

    def go_on(self, states: States) -> str:
        """Submit what is left, if jobs have ended since Slurm took some; return what to tell of it.

        It ends where no run waits or runs for GIVE_UP_S: then there is another reason, or other
        jobs have all the places.
        """
        now, before, taken = time.monotonic(), len(self.left), len(self._taken)
        active = sum(state.status in UNDER_WAY for state in states.found.values())
        if active < self._seen:
            self._pause_s = AGAIN_S
        if now < self._tried + self._pause_s or (active and active >= self._active):
            return ""
        self._tried, self._seen = now, active
        self._ended = None if active else self._ended or now
        if not self.left:
            return self._collect(states)
        try:
            note = self._submit_left(states)
        except UsageError as error:
            note = f"{before} runs are not submitted: {error}"
            # After any other failure, as where Slurm did not answer, a job may exist all the same.
            if not (isinstance(error, lock.Busy) or at_limit(error)):
                self.left = ()
        more = len(self._taken) - taken
        self._pause_s = AGAIN_S if more else min(2 * self._pause_s, AGAIN_AT_LAST_S)
        if more and self.left:
            return f"{more} more runs are submitted, {len(self.left)} are left"
        if more:
            return "; ".join(filter(None, [f"{more} more runs are submitted", note]))
        if self.left and not self._too_late():
            return ""
        self.left = ()
        return note

    def _too_late(self) -> bool:
        return self._ended is not None and self._tried >= self._ended + GIVE_UP_S

    @closed_to_others()
    def _collect(self, states: States) -> str:
        """Submit the job that collects; return what to tell of it."""
        found, note = states.look(fresh=True), ""
        if any(_cancelled(run_id, states) for run_id in self._watched):
            self.give_up()
            return ""
        active = [r for r, state in found.items() if state.status in UNDER_WAY]
        jobs = sorted({str(self._start(r)[0]).split("_")[0] for r in active})
        wanted = options.submission(self._plan, sorted(self._taken), self._site, self._request)
        assert self.runs is not None
        with contextlib.suppress(lock.Busy), lock.held(self._plan.paths):
            self.runs, note = collect_after(self.runs, wanted, jobs)
        if self.runs.collect_job:
            return f"job {self.runs.collect_job} then collects"
        self._pause_s = min(2 * self._pause_s, AGAIN_AT_LAST_S)
        if self.runs.collect_left and not self._too_late():
            return ""  # that it was refused has been told
        self.give_up()
        return note

    @closed_to_others()
    def _submit_left(self, states: States) -> str:
        """Submit what is left; return a note of what failed.

        Raises UsageError where Slurm refuses, and lock.Busy where another launcher submits.
        """
        with lock.held(self._plan.paths):
            states.forget(self.left)
            found = states.look(fresh=True)
            # Another launcher may have submitted some of them; how those ended is its concern.
            waiting = [
                r
                for r in self.left
                if found[r].status not in ("ok", *UNDER_WAY) and self._start(r) == self._starts[r]
            ]
            if not waiting or any(_cancelled(run_id, states) for run_id in self._watched):
                self.left = ()
                why = "others were cancelled"
                return f"{len(waiting)} runs are not submitted: {why}" if waiting else ""
            note = self.submit(waiting, states)
            states.forget(waiting)
        return note

    def _start(self, run_id: str) -> tuple[object, object]:
        """What tells the newest start of a run from others."""
        job = read_job(self._plan.paths.run(run_id)) or {}
        return job.get("job_id"), job.get("started")


def _cancelled(run_id: str, states: States) -> bool:
    """Whether Slurm says so of the run's job: a command may also end itself by SIGTERM."""
    job = states.jobs.get(run_id)
    return job is not None and job.state == "CANCELLED" and states.found[run_id].status != "ok"
