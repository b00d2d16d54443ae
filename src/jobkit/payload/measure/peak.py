"""The run's own peak of memory: without what was there only to measure it."""

import contextlib

import torch

from jobkit.payload import host
from jobkit.payload.host import PeakMemory


class OwnPeak:
    """The peaks of a process's memory, less the time in which something else was held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: PeakMemory | None = None  # peaks up to the last pause
        self._paused = False
        self._reserved = 0  # bytes, when it was paused

    def now(self) -> PeakMemory:
        """The peaks so far."""
        if self._paused and self._before:
            return self._before
        found = host.peak_memory_mib(self._device)
        if self._before:  # NaN, where it is not known, is so in both
            found = PeakMemory(*map(max, self._before, found))
        return found

    def pause(self) -> None:
        """Take no more notice of the memory from here on."""
        self._before, self._paused = self.now(), True
        if self._device.type == "cuda":
            self._reserved = torch.cuda.memory_reserved(self._device)

    def resume(self) -> None:
        """Take notice again: what was held in between has been freed.

        On a GPU as much is reserved as before, so that the next iterations, which are timed, need
        not ask the driver for it.
        """
        host.reset_peak_memory(self._device)
        if self._device.type == "cuda":
            missing = self._reserved - torch.cuda.memory_reserved(self._device)
            with contextlib.suppress(torch.OutOfMemoryError):  # another process has it by now
                torch.empty(max(missing, 0), dtype=torch.uint8, device=self._device)
            torch.cuda.reset_peak_memory_stats(self._device)  # it was allocated for a moment
        self._paused = False
