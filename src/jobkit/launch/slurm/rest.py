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
from jobkit.launch.slurm import commands, options
from jobkit.launch.slurm.jobs import SlurmRuns, collect_after, start
from jobkit.launch.slurm.own import is_anothers
from jobkit.launch.slurm.submit import cancel_stamp, may_pass, no_answer
from jobkit.launch.states import States, hold_places
from jobkit.outcome.facts import read_job
from jobkit.outcome.join import job_ids
from jobkit.outcome.status import UNDER_WAY
from jobkit.paths import read_json
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
        # How many more are tried than that: one after a try of which Slurm took all, and twice as
        # many after the next. Whatever is tried and refused is cut down to one, call by call.
        self._more = 0
        self._pause_s, self._tried = AGAIN_S, -math.inf
        self._seen: float = math.inf  # how many waited or ran at the last try
        self._ended: float | None = None  # since when no run of the study waits or runs
        self._unknown = False  # a call got no answer: its jobs may exist
        self._cancelled, self._collector = cancel_stamp(plan.paths), _collector(plan)

    def submit(self, run_ids: Sequence[str], states: States, most: int | None = None) -> str:
        """Submit the runs, at most so many, or as many as Slurm takes; return what failed."""
        wanted = options.submission(self._plan, run_ids[:most], self._site, self._request)
        later_ids = () if most is None else tuple(run_ids[most:])
        wanted = replace(wanted, later=later_ids)
        active = [r for r, state in states.found.items() if state.status in UNDER_WAY]
        jobs = {states.jobs[r].job_id.split("_")[0] for r in active if r in states.jobs}
        full = hold_places(self._plan, states.found)
        later, note = start(wanted, self._request.collect, sorted(jobs), full)
        if later.left and not self.runs and self._request.at_once:
            note += "; --max-running applies to each job array, also to those submitted later"
        self.runs = self.runs.and_later(later) if self.runs else later
        self.left = later.left
        self._starts = {run_id: self._start(run_id) for run_id in self.left}
        self._unknown = no_answer(note)
        self._more = 0 if len(self.left) > len(later_ids) else max(1, 2 * self._more)
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
        if now < self._tried + self._pause_s or (active and active >= self._active + self._more):
            return ""
        self._tried, self._seen = now, active
        self._ended = None if active else self._ended or now
        if not self.left:
            return self._collect(states)
        try:
            note = self._submit_left(states)
        except UsageError as error:
            note = f"{before} runs are not submitted: {error}"
            self._unknown |= no_answer(error)
            if not (isinstance(error, lock.Busy) or may_pass(error)):
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
        if self._is_cancelled(states):
            self.give_up()
            return ""
        active = [r for r, state in found.items() if state.status in UNDER_WAY]
        jobs = sorted({str(self._start(r)[0]).split("_")[0] for r in active})
        wanted = options.submission(self._plan, sorted(self._taken), self._site, self._request)
        assert self.runs is not None
        with contextlib.suppress(lock.Busy), lock.held(self._plan.paths):
            if _collector(self._plan) != self._collector:  # another launcher has submitted one
                self.give_up()
                return ""
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
            why = self._is_cancelled(states)
            if not why and waiting and self._unknown and (lost := self._lost_jobs()):
                why = (
                    f"Slurm did not answer, and job {lost[0]} may be of them: cancel it, try again"
                )
            if why or not waiting:
                self.left = ()
                return f"{len(waiting)} runs are not submitted: {why}" if waiting else ""
            active = sum(found[r].status in UNDER_WAY for r in found)
            places = self._active + self._more - active
            most = len(waiting) if math.isinf(places) else max(1, int(places))
            note = self.submit(waiting, states, most)
            states.forget(waiting)
        return note

    def _is_cancelled(self, states: States) -> str:
        """What was cancelled since this launch began; empty for nothing."""
        if any(_cancelled(run_id, states) for run_id in self._watched):
            return "others were cancelled"
        stamp = cancel_stamp(self._plan.paths)
        return "the study was cancelled" if stamp != self._cancelled else ""

    def _lost_jobs(self) -> list[str]:
        """Jobs of the study's name that nobody noted: sbatch got no answer of them.

        Raises UsageError where Slurm does not answer this either.
        """
        words = ["squeue", "-h", "--user", commands.user_name(), "--name", self._plan.study.name]
        shown = commands.call([*words, "-o", "%F"])
        if shown.returncode:
            raise UsageError("Slurm did not answer 'squeue'")
        noted = job_ids(self._plan.paths.run(run_id) for run_id in self._plan.runs)
        known = {job_id.split("_")[0] for job_id in noted}
        known.update(self.runs.masters if self.runs else ())
        unknown = sorted({*shown.stdout.split()} - known)
        return [job_id for job_id in unknown if not self._is_anothers(job_id)]

    def _is_anothers(self, job_id: str) -> bool:
        """Whether a job is of a study in another folder, which may have the same name."""
        shown = commands.call(["scontrol", "-o", "show", "job", job_id]).stdout
        return is_anothers(self._plan.paths.submitit.absolute(), shown)

    def _start(self, run_id: str) -> tuple[object, object]:
        """What tells the newest start of a run from others."""
        job = read_job(self._plan.paths.run(run_id)) or {}
        return job.get("job_id"), job.get("started")


def _collector(plan: Plan) -> object:
    """The job that collects, as the newest launcher that has submitted one noted it."""
    return (read_json(plan.paths.collect_job) or {}).get("job_id")


def _cancelled(run_id: str, states: States) -> bool:
    """Whether Slurm says so of the run's job: a command may also end itself by SIGTERM."""
    job = states.jobs.get(run_id)
    return job is not None and job.state == "CANCELLED" and states.found[run_id].status != "ok"
