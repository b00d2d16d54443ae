"""Runs on Slurm: what launch() does there, and the handle on the jobs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.launch import submit
from jobkit.launch.slurm import Submission
from jobkit.launch.states import UNDER_WAY, States
from jobkit.plan import Plan

_POLL_S = 1.0
_CANCEL_WAIT_S = 60.0


@dataclass(frozen=True)
class SlurmRuns:
    """Jobs of a study."""

    plan: Plan
    masters: Sequence[str]
    collect_job: str | None = None

    @property
    def where(self) -> str:
        """Which jobs they are, in words."""
        jobs = f"Slurm {'jobs' if len(self.masters) > 1 else 'job'} {', '.join(self.masters)}"
        return jobs + (f"; job {self.collect_job} then collects" if self.collect_job else "")

    def running(self) -> bool:
        """Whether a run of the plan waits or runs."""
        return any(state.status in UNDER_WAY for state in States(self.plan).look().values())

    def cancel(self) -> None:
        """End the jobs and wait until Slurm says that they have ended."""
        submit.cancel([*self.masters, *([self.collect_job] if self.collect_job else [])])
        deadline = time.monotonic() + _CANCEL_WAIT_S
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def start(wanted: Submission, collect: bool) -> SlurmRuns:
    """Submit the jobs and, after them, the one that collects."""
    masters = submit.submit(wanted)
    after = submit.submit_collect(wanted, masters) if collect else None
    return SlurmRuns(wanted.plan, masters, after)
