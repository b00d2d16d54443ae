"""Time, measured with the device synchronised around the clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from jobkit.payload.windows import StepWindows
from jobkit.program.why import DATA


class Clock:
    """Wall time of the timed iterations and, of it, the wait for batches.

    windows: the steps one by one, which are told of the same pauses and waits.
    """

    def __init__(self, device: torch.device, windows: StepWindows | None = None) -> None:
        self._device, self._windows = device, windows
        self._carried: tuple[int, float, float] = (0, 0.0, 0.0)
        self.restart()

    def carry(self, images: int, elapsed_s: float, data_wait_s: float) -> None:
        """Restart from the values that an earlier process measured in the same epoch."""
        self._carried = (images, elapsed_s, data_wait_s)
        self.restart()

    def so_far(self) -> tuple[int, float, float]:
        """Images, seconds, and seconds of waiting for data so far."""
        return self.images, self.elapsed_s(), self.data_wait_s

    def return_to(self, before: tuple[int, float, float]) -> None:
        """Forget what happened since a call of so_far."""
        self.images, elapsed_s, self.data_wait_s = before
        self._start = self._now() - elapsed_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def restart(self, windows: StepWindows | None = None) -> None:
        """Reset to the carried values and start again; windows: are told of pauses from now on."""
        self._windows = windows or self._windows
        self.images, before_s, self.data_wait_s = self._carried
        self._end: float | None = None
        self._start = self._now() - before_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside, such as the writing of a checkpoint."""
        begin = self._now()
        if self._windows:
            self._windows.pause()
        yield
        if self._windows:
            self._windows.resume()
        self._start += self._now() - begin

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude an iteration that happens inside: its time, images and wait for data."""
        images, waited = self.images, self.data_wait_s
        if self._windows:
            self._windows.skip()
        with self.paused():
            yield
        self.images, self.data_wait_s = images, waited

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as wait for data; the device is not synchronised here."""
        start = time.perf_counter()
        with self._windows.span(DATA) if self._windows else nullcontext():
            yield
        waited_s = time.perf_counter() - start
        self.data_wait_s += waited_s
        if self._windows:
            self._windows.waited(waited_s)

    def own_s(self) -> float:
        """Seconds since the last restart, without those of an earlier process."""
        return self.elapsed_s() - self._carried[1]

    def stop(self) -> None:
        """End the measurement once the device has done all its work."""
        self._end = self._now()

    def elapsed_s(self) -> float:
        """Seconds from the start to the stop, or to now, all work on the device included."""
        return (self._now() if self._end is None else self._end) - self._start


class Stages:
    """Seconds that each part of the start-up took."""

    def __init__(self, imported_s: float) -> None:
        self.seconds: dict[str, float | None] = {"import_s": imported_s}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one part, by the name of its field in the startup record."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def fields(self, first_s: float | None, compiled: bool) -> dict[str, float | None]:
        """The fields of the startup record; first_s: the first iteration, None before its end."""
        now_s, compiling_s = (None, first_s) if compiled else (first_s, None)
        return {**self.seconds, "compile_s": compiling_s, "first_step_s": now_s}
