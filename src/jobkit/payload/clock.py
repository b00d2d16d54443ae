"""Time, measured with the device synchronised around the clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Wall time of the timed iterations and, of it, the wait for batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def restart(self) -> None:
        """Forget what was measured, and begin anew."""
        self.data_wait_s = 0.0
        self.images = 0
        self._end: float | None = None
        self._start = self._now()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as wait for data; the device is not synchronised here."""
        start = time.perf_counter()
        yield
        self.data_wait_s += time.perf_counter() - start

    def stop(self) -> None:
        """End the measurement once the device has done all its work."""
        self._end = self._now()

    def elapsed_s(self) -> float:
        """Seconds from the start to the stop, or to now, all work on the device included."""
        return (self._now() if self._end is None else self._end) - self._start


class Stages:
    """Seconds that each part of the start-up took."""

    def __init__(self, imported_s: float) -> None:
        self.seconds = {"import_s": imported_s}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one part, by the name of its field in the startup record."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
