"""The steps of a rank in windows, as the meter of any program measures them."""

import os
import time
from functools import partial
from typing import Any

from jobkit.metric.kinds import MetricWriter
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.program.machine import watch
from jobkit.program.why import Why
from jobkit.program.windows import Meter


class StepWindows(Meter):
    """Measures the steps between two evaluations, from start() on; each rank writes its windows.

    Rank 0's are among its other records. An error is one warning, and ends no training.
    """

    _clock: Any  # a train.Clock, of the epoch, which leaves profiled steps out as well
    _before: tuple[int, float, float]  # its values before the profiled steps

    def __init__(self, report: Reporter, place: RankEnv, gpus: int) -> None:
        super().__init__("images", "training", None, environment={})
        self._place, self._gpus = {**os.environ, "LOCAL_RANK": str(place.local_rank)}, gpus
        self._report, self.rank, self._world = report, place.rank, place.world_size
        self._own: MetricWriter | None = None
        self.on = False

    def start(self, warmup: int, why: int) -> None:
        """Measure from now on; why: steps to profile at a place, 0 for none."""
        self.on, self._warmup, self.why = True, warmup, Why(why, warmup)

    def _open(self, work: float | None) -> None:
        """Have a writer at the first step: a rank that trains nothing leaves no file."""
        report = self._report
        if report.writer is None:
            self._own = report.rank_writer("r")
        self._writer = report.writer or self._own
        self.on = self._writer is not None
        self._sampler = watch(partial(report.rank_writer, "s"), self.rank, self._place, self._gpus)
        if report.folder is not None:
            self.why.open(partial(report.rank_writer, "w"), report.folder, self._place, self.rank)

    def _between(self) -> None:
        """Leave the steps out of the epoch's clock as well."""
        if not self.aside:
            self._before = self._clock.so_far()
        super()._between()
        if not self.aside:
            self._return()

    def _return(self) -> None:
        if self._before[0]:  # else the epoch would have no time at all
            self._clock.return_to(self._before)

    def begin_epoch(self, number: int, clock: Any) -> None:
        """The first step of an epoch is next, or of what is left of it."""
        self._clock, self._before = clock, clock.so_far()
        self.begin(time.perf_counter())
        self.hold(False)
        self._epoch = number

    def end_epoch(self) -> None:
        """Its last step is done, on the device too; what comes is no training."""
        if self.aside:
            self._return()
        self.close()
        self.hold(True)

    def skip(self) -> None:
        """The next step is not counted, as the model is compiled in it."""
        self.close()
        self._begin = None

    def finish(self) -> None:
        """The training is over: write the last window."""
        self.close()
        self.why.end(self.steps)
        if self._sampler:
            self._sampler.stop()
        if self._own:
            self._own.close()
        self.on = False
