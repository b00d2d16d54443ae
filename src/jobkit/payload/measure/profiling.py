"""Traces of chosen iterations and ranks by torch.profiler, in Chrome's format.

Open one in chrome://tracing or https://ui.perfetto.dev. Profiling costs time; a message reports how
much: the profiled iterations compared with those before them.
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from jobkit.payload.batches import Step
from jobkit.spec.runspec import Window

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_BEFORE = 5  # iterations to compare with


class Profiler:
    """Profiles a window of iterations on this rank, or only times them if it is not chosen."""

    def __init__(self, window: Window, trace: Path | None) -> None:
        """trace: the file to write; None: this rank is not profiled."""
        self._window, self._trace = window, trace
        self._profile: profile | None = None
        self._plain: list[float] = []
        self._profiled: list[float] = []
        self._begin_s = 0.0

    def wants(self, trainer: "Trainer") -> bool:
        """See Observer."""
        number = trainer.progress.iteration + 1
        return self._window.first - _BEFORE <= number <= self._window.last

    def before(self, trainer: "Trainer", step: Step) -> None:
        """See Observer."""
        number = trainer.progress.iteration + 1
        if self._trace and self._profile is None and number >= self._window.first:
            with trainer.clock.paused():
                self._profile = _start(trainer.group.device)
        self._begin_s = trainer.clock.so_far()[1]

    def after(self, trainer: "Trainer", step: Step) -> None:
        """See Observer."""
        seconds = trainer.clock.so_far()[1] - self._begin_s
        number = trainer.progress.iteration  # the one that is done
        (self._profiled if number >= self._window.first else self._plain).append(seconds)
        if number == self._window.last:
            with trainer.clock.paused():
                self._finish(trainer)

    def _finish(self, trainer: "Trainer") -> None:
        """Write the trace, and report its path and cost. Every rank calls."""
        where = ""
        if self._profile is not None and self._trace:
            self._profile.stop()
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._trace))
            self._profile, where = None, str(self._trace)
        traces = [name for name in trainer.group.gather(where) if name]
        text = f"iterations {self._window.first} to {self._window.last} were profiled"
        if self._plain:
            factor = statistics.median(self._profiled) / statistics.median(self._plain)
            factor = max(trainer.group.gather(factor))
            text += f", and took {factor:.2f} times as long as the {len(self._plain)} before them"
        trainer.report.info(f"{text}; {len(traces)} traces: {', '.join(traces)}")


def _start(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    started = profile(activities=activities, record_shapes=True)
    started.start()
    return started
