"""Counts the collectives of a piece of a program."""

import os
from types import TracebackType

import torch


class Counted:
    """A context that counts the collectives issued in it, by torch's profiler."""

    def __init__(self) -> None:
        os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler reports its own start and stop
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._counts: dict[str, int] = {}

    def __enter__(self) -> "Counted":
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        for event in self._profiler.key_averages():
            if event.key.startswith("c10d::"):
                self._counts[event.key] = self._counts.get(event.key, 0) + event.count

    def calls(self, word: str = "") -> int:
        """Calls of the operations whose names, without underscores, contain a word; or all."""
        return sum(n for name, n in self._counts.items() if word in name.replace("_", ""))
