"""Submits a study's runs to Slurm, and the handle on the jobs."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jobkit.launch.slurm import commands, submit
from jobkit.launch.slurm.options import Submission
from jobkit.launch.states import States
from jobkit.outcome.status import UNDER_WAY
from jobkit.spec.plan import Plan

_POLL_S = 2.0
_CANCEL_WAIT_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SlurmRuns:
    """The submitted jobs of a study."""

    plan: Plan
    masters: Sequence[str]
    collect_job: str | None = None
    left: tuple[str, ...] = ()  # runs that Slurm did not take: no more jobs may be submitted now
    collect_left: bool = False  # nor did it take the collecting one

    @property
    def where(self) -> str:
        """The ids of the jobs, for a message."""
        if not self.masters:
            return "no job: no more may be submitted now"
        jobs = f"Slurm {'jobs' if len(self.masters) > 1 else 'job'} {', '.join(self.masters)}"
        return jobs + (f"; job {self.collect_job} then collects" if self.collect_job else "")

    def running(self, states: States) -> bool:
        """Whether a run of the plan waits or runs; Slurm is asked again before it is not."""
        return _under_way(states) or _under_way(states, fresh=True)

    def and_later(self, later: "SlurmRuns") -> "SlurmRuns":
        """These jobs and those that were submitted later."""
        return replace(later, masters=[*self.masters, *later.masters])

    def cancel(self) -> None:
        """End the jobs and wait until Slurm reports their end."""
        commands.cancel([*self.masters, *([self.collect_job] if self.collect_job else [])])
        wait_for_end(self.plan)


def wait_for_end(plan: Plan) -> bool:
    """Wait up to a minute until no run of the plan waits or runs; return whether none does."""
    states, deadline = States(plan), time.monotonic() + _CANCEL_WAIT_S
    while _under_way(states, fresh=True):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _under_way(states: States, fresh: bool = False) -> bool:
    return any(state.status in UNDER_WAY for state in states.look(fresh).values())


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Between sbatch and the record of the job's id a signal would leave unknown jobs behind."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def start(
    wanted: Submission, collect: bool, before: Sequence[str] = (), full: bool = False
) -> tuple[SlurmRuns, str]:
    """Submit the jobs and the collecting one; return their handle and a note of what failed.

    before: other jobs of the study, for which the collecting one waits too. full: as of submit.
    """
    left, note = wanted.later, ""
    with _uninterrupted():
        try:
            masters = submit.submit(wanted, full)
        except submit.LimitReached as limit:
            masters, left, note = limit.masters, limit.left, str(limit)
        runs = SlurmRuns(wanted.plan, masters, left=left)
        if collect and not left:  # else the launch that submits the rest submits it too
            runs, note = collect_after(runs, wanted, [*before, *masters])
    return runs, note


def collect_after(
    runs: SlurmRuns, wanted: Submission, jobs: Sequence[str]
) -> tuple[SlurmRuns, str]:
    """Submit the job that collects after these; return the handle with it, or a note of why not."""
    try:
        with _uninterrupted():
            job_id = submit.submit_collect(wanted, jobs)
    except submit.CollectRefused as error:
        note = f"the collect job was not submitted: {error}"
        left = submit.at_limit(error)
        return replace(runs, collect_left=left), f"{note}; run ./plot_results.sh after the last run"
    return replace(runs, collect_job=job_id, collect_left=False), ""
