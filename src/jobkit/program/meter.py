"""Measures the training loop of any program: rate, step times, wait for data; no evaluation.

    from jobkit import meter
    meter.start(unit="samples")
    for epoch in range(epochs):
        for x, y in meter.batches(loader):        # measures the wait for data
            ...
            optimizer.step()
            meter.step(work=len(x))               # of this rank
        with meter.paused():                      # evaluation and checkpoints are not training
            val_loss = evaluate()
        meter.epoch(epoch, val_loss=val_loss)
    meter.end()

Standard library only, Python 3.10. In a study (JOBKIT_RUN_DIR is set) each rank appends
to its own file there, and rank 0 copies its lines to standard output; elsewhere rank 0 only
prints. After start() no call raises: what fails is one warning, and the training continues. A GPU
is synchronised at the ends of windows and pauses, if torch is imported already.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .process import warn
from .windows import Meter


class Batches:
    """A loader whose batches are waited for with a clock; has the loader's length."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        meter = _meter
        meter.begin(time.perf_counter())
        meter.wait()
        try:
            for batch in self._loader:
                meter.got()
                yield batch
                meter.wait()
        finally:  # of the loader's last wait, which may be an error
            meter.got()


class _Nothing:
    """Stands for a measurement that has not begun, or could not: no call does anything."""

    on = False

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


_meter: Any = _Nothing()


def start(
    unit: str | None = None, *, source: str = "meter", environment: Mapping[str, str] | None = None
) -> None:
    """Begin to measure: at the head of the training, on every rank.

    unit: of the work: samples, tokens, ... The hook says the rest. A second call does nothing.
    """
    global _meter
    if _meter.on:
        return
    auto = sys.modules.get("jobkit_auto.hook")
    if auto and source != "auto":
        auto.step_aside()
    try:
        _meter = Meter(unit, source, environment)
        _meter.begin(time.perf_counter())
        if processes := sys.modules.get("multiprocessing.util"):  # its children skip atexit
            processes.Finalize(None, _at_exit, exitpriority=0)
    except Exception as error:
        warn(f"{type(error).__name__}: {error}; nothing is measured")


def batches(loader: Any) -> Batches:
    """The loader's batches; the time of waiting for them is data_wait_s."""
    return Batches(loader)


def step(work: float | None = None) -> None:
    """An optimizer step is done. work: units of this rank in it."""
    _meter.step(work)


def epoch(number: float, /, **values: Any) -> None:
    """An epoch is done and evaluated; values of all ranks: columns of epochs.csv."""
    _meter.epoch(number, values)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Exclude what happens inside: evaluation, checkpoints."""
    meter = _meter
    meter.pause()
    try:
        yield
    finally:
        meter.resume()


def end(status: str = "ok", reason: str = "") -> None:
    """The training is over: ok, failed or preempted."""
    _meter.end(status, reason)


def _at_exit() -> None:
    _meter.exited()
    _meter.leave()


def _forget() -> None:
    """A forked child, such as a worker of a loader, is another process: nothing is measured."""
    global _meter
    _meter = _Nothing()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
