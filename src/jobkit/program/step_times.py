"""How many steps a window has, and their times: of the host's clock, or of events on a GPU."""

import contextlib
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

WINDOW_S = 10.0  # a window lasts about this long at most, if its steps are shorter
WINDOW_STEPS = 50  # and has so many steps at most, in the first WINDOW_STEPS**2 steps
FIRST_STEPS = 5  # and at most so many, or as many as were compared before it


def spacing(step_s: float, steps: int, compared: int) -> int:
    """Steps of a window: 1, 5, 10, 50, ... Each divides the next, so that ranks share ends.

    steps: done so far; compared: those of them after the warm-up. A program that ends by os._exit
    loses its last window, so a short one has short windows.
    """
    most = max(WINDOW_STEPS, steps / WINDOW_STEPS)
    most = min(WINDOW_S / max(step_s, 1e-9), most, max(FIRST_STEPS, compared))
    size, factor = 1, 5
    while size * factor <= most:
        size, factor = size * factor, 7 - factor
    return size


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Percentiles of some steps' times, as a window has them; empty without a step."""
    ordered = sorted(times)
    if not ordered:
        return {}
    found = {f"step_p{p}_s": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 95, 99)}
    return {**found, "step_max_s": ordered[-1]}


class StepEvents:
    """An event after each step's work on the GPU, where a step on the host is only its issue.

    Nothing waits for the GPU: the events are read when a window ends, which synchronises anyway.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []  # None: between its neighbours lies more than a step

    def after_step(self, whole: bool = True) -> None:
        """A step has been issued; does nothing in a program without a GPU.

        whole: its begin was seen.
        """
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return
        if not whole:
            self.cut()
        event = None
        if not cuda.is_current_stream_capturing():
            event = cuda.Event(enable_timing=True)
            event.record()
        self._events.append(event)

    def cut(self) -> None:
        """The time until the next step is not that of a step."""
        self._events.append(None)

    def times_s(self, mean_s: float = 0.0) -> list[float]:
        """Seconds of the steps since the last call; none where their events cannot be compared.

        mean_s: of a step by the host's clock. Events that say less than half of it are of a stream
        or a device that does not do the work.
        """
        events, self._events = self._events, self._events[-1:]
        # Of two devices, or not done, as where another rank's crash left the GPU waiting.
        with contextlib.suppress(RuntimeError, ValueError):
            pairs = [(a, b) for a, b in pairwise(events) if a is not None and b is not None]
            found = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
            return found if sum(found) >= mean_s / 2 * len(found) else []
        return []
