"""A request to stop, received as a signal, and injected faults for drills. Without torch.

A signal only sets a flag: the ranks agree between two iterations, save, and end. Slurm's warning
(USR1 or USR2) counts from the start of the process; INT and TERM end it as usual until there is
something to save.

JOBKIT_FAULT=KIND@ITERATION[:RANK[:ATTEMPT]] injects a fault: after that iteration the rank kills
itself (kill), raises an exception (raise), hangs (hang), sends itself a signal (term, usr1, usr2),
or pauses (hold) until it receives a signal, for a fault from outside. Rank and attempt default to
0, so that a restarted run meets the fault once. The file attempts/<attempt>/fault_marker is written
at that moment; a paused rank continues once it is gone.
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

ENDING = (signal.SIGINT, signal.SIGTERM)
VARIABLE = "JOBKIT_FAULT"
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "usr2": signal.SIGUSR2,
}
KINDS = (*SIGNALS, "raise", "hang", "hold")
_POLL_S = 0.02


class Stopped(Exception):
    """The training stops early on request; the text says on which signal and where."""


class StopRequest:
    """Whether a signal asked this process to end. To be used in the main thread."""

    def __init__(self) -> None:
        self.signal = ""  # the name of the first one

    def listen(self, *numbers: signal.Signals) -> None:
        """Start to receive these signals, or Slurm's warnings."""
        for number in numbers or (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._receive)
            signal.siginterrupt(number, False)  # what libraries wait for goes on

    def _receive(self, number: int, _: object) -> None:
        self.signal = self.signal or signal.Signals(number).name


@dataclass(frozen=True)
class PlannedFault:
    """One fault of this rank, at one iteration."""

    kind: str
    iteration: int
    marker: Path | None = None  # written right before the injection

    def inject(self, iteration: int, stop: StopRequest) -> None:
        """Inject the fault if this is its iteration."""
        if iteration != self.iteration:
            return
        if self.marker:
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            self.marker.touch()
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "raise":
            raise RuntimeError(f"injected after iteration {iteration}")
        elif self.kind == "hang":
            while True:
                time.sleep(1)
        elif self.kind == "hold":
            while not stop.signal and self.marker and self.marker.exists():
                time.sleep(_POLL_S)


def read_fault(
    attempt: int,
    rank: int,
    paths: RunPaths | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedFault | None:
    """The fault that the environment requests for this rank of this attempt.

    paths: where its marker is written. Raises UsageError for one that cannot be read.
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
    if (int(match[3] or 0), int(match[4] or 0)) != (rank, attempt):
        return None
    marker = paths.fault_marker(attempt) if paths else None
    return PlannedFault(match[1], int(match[2]), marker)
