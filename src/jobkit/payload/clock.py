"""The time of an epoch, and its steps in windows, as the meter of any program measures them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from jobkit.metric.kinds import MetricWriter
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.program.machine import watch
from jobkit.program.process import synchronised_s
from jobkit.program.why import DATA, Why
from jobkit.program.windows import Meter


class StepWindows(Meter):
    """Measures the steps between two evaluations, from start() on; each rank writes its windows.

    Rank 0's are among its other records. An error is one warning, and ends no training.
    """

    _clock: "Clock"  # of the epoch, which leaves profiled steps out as well
    _before: tuple[int, float, float]  # its values before the profiled steps

    def __init__(self, report: Reporter, place: RankEnv, gpus: int) -> None:
        super().__init__("images", None, 0, "training", None, environment={})
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

    def begin_epoch(self, number: int, clock: "Clock") -> None:
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


class Clock:
    """Wall time of the timed iterations and, of it, the wait for batches.

    Tells the windows of the same iterations of waits and pauses.
    """

    def __init__(self, windows: StepWindows) -> None:
        self._windows = windows
        self.restart()

    def restart(self) -> None:
        """Forget what was measured, and start again."""
        self._end: float | None = None
        self.return_to((0, 0.0, 0.0))

    def so_far(self) -> tuple[int, float, float]:
        """Images, seconds, and seconds of waiting for data so far."""
        return self.images, self.elapsed_s(), self.data_wait_s

    def return_to(self, before: tuple[int, float, float]) -> None:
        """Forget what happened since a call of so_far."""
        self.images, elapsed_s, self.data_wait_s = before
        self._start = synchronised_s() - elapsed_s

    @contextmanager
    def paused(self, skip: bool = False) -> Iterator[None]:
        """Exclude what happens inside, such as the writing of a checkpoint; skip: an iteration."""
        before = self.so_far()
        if skip:
            self._windows.skip()
        self._windows.pause()
        yield
        self._windows.resume()
        self.return_to(before)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as wait for data; the device is not synchronised here."""
        start = time.perf_counter()
        with self._windows.span(DATA):
            yield
        waited_s = time.perf_counter() - start
        self.data_wait_s += waited_s
        self._windows.waited(waited_s)

    def stop(self) -> None:
        """End the measurement once the device has done all its work."""
        self._end = synchronised_s()

    def elapsed_s(self) -> float:
        """Seconds from the start to the stop, or to now, all work on the device included."""
        return (synchronised_s() if self._end is None else self._end) - self._start
