"""Submits a study's runs to Slurm, and the handle on the jobs."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jobkit.launch.slurm import commands, submit
from jobkit.launch.slurm.options import Submission
from jobkit.launch.states import States
from jobkit.outcome.state import UNDER_WAY
from jobkit.spec.study import Plan

_POLL_S = 2.0
_CANCEL_WAIT_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SlurmRuns:
    """The submitted jobs of a study."""

    plan: Plan
    masters: Sequence[str]
    collect_job: str | None = None

    @property
    def where(self) -> str:
        """The ids of the jobs, for a message."""
        jobs = f"Slurm {'jobs' if len(self.masters) > 1 else 'job'} {', '.join(self.masters)}"
        return jobs + (f"; job {self.collect_job} then collects" if self.collect_job else "")

    def running(self, states: States) -> bool:
        """Whether a run of the plan waits or runs; Slurm is asked again before it is not."""
        return _under_way(states) or _under_way(states, fresh=True)

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


def start(wanted: Submission, collect: bool) -> tuple[SlurmRuns, tuple[str, ...], str]:
    """Submit the jobs and the collecting one; return their handle, what is left, and a note."""
    with _uninterrupted():
        masters, left, note = submit.submit(wanted)
        runs = SlurmRuns(wanted.plan, masters)
        if collect and not left:  # else the launch that submits the rest submits it too
            try:
                runs = replace(runs, collect_job=submit.submit_collect(wanted, masters))
            except submit.CollectRefused as error:
                note = f"the collect job was not submitted: {error}; run ./plot_results.sh"
    return runs, left, note
