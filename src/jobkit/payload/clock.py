"""The steps of a rank in windows, as the meter of any program measures them."""

import os
import time
from functools import partial
from typing import Any

from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.program.lines import Writer
from jobkit.program.machine import watch
from jobkit.program.process import synchronised_s, warn
from jobkit.program.why import Why
from jobkit.program.windows import Meter


class StepWindows(Meter):
    """Measures the steps between two evaluations, from start() on; each rank writes its windows.

    Rank 0's are among its other records. An error is one warning, and ends no training.
    """

    # Of the epoch: the sums of its windows after the warm-up, in which no profiled step is.
    images, epoch_s, wait_s = 0, 0.0, 0.0
    _paused_s = 0.0  # of the whole epoch

    def __init__(self, report: Reporter, place: RankEnv, gpus: int) -> None:
        super().__init__("images", "training", environment={})
        self._place, self._gpus = {**os.environ, "LOCAL_RANK": str(place.local_rank)}, gpus
        self._report, self.rank, self._world = report, place.rank, place.world_size
        self._own: Writer | None = None
        self.on = False

    def start(self, warmup: int, why: int) -> None:
        """Measure from now on; why: steps to profile at a place, 0 for none."""
        self.on, self._warmup, self.why = True, warmup, Why(why, warmup)

    def _open(self, work: float | None) -> None:
        """Have a writer at the first step: a rank that trains nothing leaves no file."""
        report = self._report
        none = Writer(study="", run_id="", attempt=0, rank=self.rank, path=None, log=None)
        self._writer = report.writer or none
        try:
            if report.writer is None and (own := report.rank_writer("r")):
                self._own = self._writer = own
            opened = partial(report.rank_writer, "s")
            self._sampler = watch(opened, self.rank, self._place, self._gpus)
            if report.folder is not None:
                opened = partial(report.rank_writer, "w")
                self.why.open(opened, report.folder, self._place, self.rank)
        except OSError as error:  # the sums of its epochs are needed still
            warn(f"a file of records cannot be opened: {error}")

    def _write(self, kind: str, **fields: Any) -> None:
        super()._write(kind, **fields)
        if kind == "window" and not fields["warmup"]:
            self.images += fields["work"]
            self.epoch_s += fields["wall_s"]
            self.wait_s += fields["data_wait_s"] or 0.0

    def exclude(self, begin: float, end: float) -> None:
        super().exclude(begin, end)
        self._paused_s += end - begin

    def begin_epoch(self, number: int) -> None:
        """The first step of an epoch is next, or of what is left of it."""
        self.hold(False)
        self._begin = self._last = time.perf_counter()
        self._epoch = number
        self.images, self.epoch_s, self.wait_s, self._paused_s = 0, 0.0, 0.0, 0.0

    def end_epoch(self, begin: float, images: int, wait_s: float) -> None:
        """Its last step is done, on the device too; what comes is no training.

        begin: a reading of the clock. All of the epoch counts, as the sums say, where no window
        does: its steps were profiled, or nothing is measured.
        """
        self.close()
        if not (self.on and self.epoch_s):
            self.images, self.wait_s = images, wait_s
            self.epoch_s = synchronised_s() - begin - self._paused_s
        self.hold(True)

    def skip(self) -> None:
        """Leave the next step out of the windows, if the epoch has one without it."""
        self.close()
        if self.epoch_s:
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
