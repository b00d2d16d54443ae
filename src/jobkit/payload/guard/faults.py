"""Faults on purpose, for drills: JOBKIT_FAULT=KIND@ITERATION[:RANK[:ATTEMPT]].

After that iteration the rank kills itself (kill), raises an exception (raise), hangs (hang), gets
a signal (term, usr1, usr2), or holds still (hold) until it hears a signal, for a fault that comes
from outside. Rank and attempt are 0 where they are left out: a run that is started again meets the
fault once. The file attempts/<attempt>/struck tells when; a rank that holds goes on without it.
"""

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.paths import RunPaths
from jobkit.payload.guard.stopping import StopRequest

VARIABLE = "JOBKIT_FAULT"
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "usr2": signal.SIGUSR2,
}
KINDS = (*SIGNALS, "raise", "hang", "hold")
_HELD_POLL_S = 0.02


class InjectedFault(RuntimeError):
    """The exception that a drill asked for."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault, at one iteration of one rank in one attempt."""

    kind: str
    iteration: int
    rank: int
    attempt: int
    mark: Path | None = None  # left right before it strikes

    def strike(self, iteration: int, stop: StopRequest) -> None:
        """Do it, when its iteration has come. stop: where a signal is heard."""
        if iteration != self.iteration:
            return
        if self.mark:
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            self.mark.touch()
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "raise":
            raise InjectedFault(f"a drill's fault after iteration {iteration}")
        elif self.kind == "hang":
            while True:
                time.sleep(1)
        elif self.kind == "hold":
            while not stop.signal and self.mark and self.mark.exists():
                time.sleep(_HELD_POLL_S)


def planned(
    attempt: int,
    rank: int,
    paths: RunPaths | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedFault | None:
    """The fault that the environment plans for this rank of this attempt.

    paths: where its mark is left. Raises UsageError for one that cannot be read.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    number = "([0-9]{1,9})"
    form = f"({'|'.join(KINDS)})@{number}(?::{number})?(?::{number})?"
    match = re.fullmatch(form, text)
    if not match:
        raise UsageError(
            f"{VARIABLE}={text}: must be KIND@ITERATION[:RANK[:ATTEMPT]], with a kind of "
            f"{', '.join(KINDS)}"
        )
    mark = paths.fault_marker(attempt) if paths else None
    fault = PlannedFault(match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0), mark)
    return fault if (fault.rank, fault.attempt) == (rank, attempt) else None
