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
    """Measures the steps between two evaluations; each rank writes its own windows.

    Rank 0's are among its other records. An error is one warning, and ends no training.
    """

    def __init__(
        self, report: Reporter, place: RankEnv, warmup: int, gpus: int = 1, why: int = 0
    ) -> None:
        super().__init__("images", None, warmup, "training", None, environment={})
        self.why = Why(why, self._warmup)
        self._clock: Any = None  # of the epoch, which leaves profiled steps out as well
        self._before = (0, 0.0, 0.0)  # its values before the profiled steps
        self._place, self._gpus = {**os.environ, "LOCAL_RANK": str(place.local_rank)}, gpus
        self._report, self.rank, self._world = report, place.rank, place.world_size
        self._own: MetricWriter | None = None

    def _open(self, work: float | None) -> None:
        """Have a writer at the first step: a rank that trains nothing leaves no file."""
        writer = self._report.writer
        if writer is None:
            writer = self._own = self._report.rank_writer()
        self._writer = writer
        self.on = writer is not None
        self._sampler = watch(
            partial(self._report.rank_writer, "s"), self.rank, self._place, self._gpus
        )
        if (folder := self._report.folder) is not None:
            self._profile_here(partial(self._report.rank_writer, "w"), folder, self._place)

    def _between(self) -> None:
        """Leave the steps out of the epoch's clock as well."""
        if not self.aside and self._clock:
            self._before = self._clock.so_far()
        super()._between()
        if not self.aside:
            self._return()

    def _return(self) -> None:
        if self._clock and self._before[0]:  # else the epoch would have no time at all
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
