"""The steps of a rank in windows, as the meter of any program measures them."""

import os
import time

from jobkit.metric.kinds import MetricWriter
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.program.machine import watch
from jobkit.program.windows import Meter


class StepWindows(Meter):
    """Measures the steps between two evaluations; each rank writes its own windows.

    Rank 0's are among its other records. An error is one warning, and ends no training.
    """

    def __init__(self, report: Reporter, place: RankEnv, warmup: int, gpus: int = 1) -> None:
        super().__init__("images", None, warmup, "training", None, environment={})
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
        self._sampler = watch(self._report.sample_writer, self.rank, self._place, self._gpus)

    def begin_epoch(self, number: int) -> None:
        """The first step of an epoch is next, or of what is left of it."""
        self.begin(time.perf_counter())
        self.hold(False)
        self._epoch = number

    def end_epoch(self) -> None:
        """Its last step is done, on the device too; what comes is no training."""
        self.close()
        self.hold(True)

    def skip(self) -> None:
        """The next step is not counted, as the model is compiled in it."""
        self.close()
        self._begin = None

    def finish(self) -> None:
        """The training is over: write the last window."""
        self.close()
        if self._sampler:
            self._sampler.stop()
        if self._own:
            self._own.close()
        self.on = False
