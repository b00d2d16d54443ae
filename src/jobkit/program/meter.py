"""Measures the training loop of any program: rate, step times, wait for data; no evaluation.

    from jobkit import meter                      # or a copy: python -m jobkit meter > meter.py
    meter.start(unit="samples")
    for epoch in range(epochs):
        for x, y in meter.batches(loader):        # measures the wait for data
            ...
            optimizer.step()
            meter.step(work=len(x))               # of this rank; or start(work_per_step=...)
        with meter.paused():                      # evaluation and checkpoints are not training
            val_loss = evaluate()
        meter.epoch(epoch, val_loss=val_loss)
    meter.end()

One file, standard library only, Python 3.10. In a study (JOBKIT_RUN_DIR is set) each rank appends
to its own file there, and rank 0 copies its lines to standard output; elsewhere rank 0 only prints
(JOBKIT_METER=0: nothing). After start() no call raises: what fails is one warning, and the training
continues. A GPU is synchronised at the ends of windows and pauses, if torch is imported already.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .process import Guarded, distributed, guarded, warn
from .why import OWN
from .windows import Meter


class StopRequest(Guarded):
    """Whether the stop signal came to any rank: the answer is the same on all of them."""

    def __init__(self) -> None:
        self._came, self._agreed = False, False
        self._group: Any = None
        self._pending: Any = None
        self._before: dict[int, Any] = {}  # the program's own handlers
        self._asked = False

    def listen(self) -> None:
        """Receive the stop signal in the main thread only."""
        number = signal.SIGUSR2
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(number) != self._receive:  # of an earlier start()
            self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._came = True
        if callable(before := self._before.get(number)):
            before(number, frame)

    def _listen_to_term(self) -> None:
        """In a pod TERM is the only warning: take it, unless the program handles it itself."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)
            os.register_at_fork(after_in_child=_default_term)  # the end of a worker process

    @guarded
    def requested(self) -> bool:
        """Ask the other ranks; their answers are read at the next call, so that none waits."""
        if not self._asked:
            self._asked = True  # a program that never asks ends by TERM as usual
            if os.environ.get("JOBKIT_POD"):
                self._listen_to_term()
        dist = distributed()
        if dist is None or dist.get_world_size() == 1:
            return self._came
        if self._group is None:  # on the CPU: a GPU need not be synchronised for it
            self._group = dist.new_group(backend="gloo")
        if self._pending:
            work, flag = self._pending
            work.wait()
            self._agreed = self._agreed or bool(flag)
        flag = sys.modules["torch"].tensor(int(self._came))
        with _meter.span(OWN) or contextlib.nullcontext():
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = work, flag
        return self._agreed


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
        iterator = iter(self._loader)
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    meter.got()
                yield batch
                meter.wait()
        finally:
            meter.got()


class _Nothing:
    """Stands for a measurement that has not begun, or could not: no call does anything."""

    on = False

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


_meter: Any = _Nothing()
_stop = StopRequest()


def start(
    unit: str | None = None,
    work_per_step: float | None = None,
    warmup_steps: int | None = None,
    *,
    source: str = "meter",
    work_source: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Begin to measure: at the head of the training, on every rank.

    unit: of the work: samples, tokens, ... work_per_step: units in one optimizer step over all
    ranks, where it is fixed. warmup_steps: steps that are not compared (5; what a study says, if
    that is more). The rest is said by the hook. A second call does nothing.
    """
    global _meter
    if _meter.on:
        return
    auto = sys.modules.get("jobkit_auto.hook")
    if auto and source != "auto":
        auto.step_aside()
    try:
        _meter = Meter(unit, work_per_step, warmup_steps, source, work_source, environment)
        _meter.begin(time.perf_counter())
        if source == "meter":
            _stop.listen()
        if processes := sys.modules.get("multiprocessing.util"):  # its children skip atexit
            processes.Finalize(None, _at_exit, exitpriority=0)
    except Exception as error:
        warn(f"{type(error).__name__}: {error}; nothing is measured")


def current() -> Any:
    """The measurement of this process, for the hook."""
    return _meter


def batches(loader: Any) -> Batches:
    """The loader's batches; the time of waiting for them is data_wait_s."""
    return Batches(loader)


def step(work: float | None = None, **values: Any) -> None:
    """An optimizer step is done. work: units of this rank in it. values: such as train_loss."""
    _meter.step(work, values)


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


def stop_requested() -> bool:
    """Whether to save and exit with code 75: the stop signal came to some rank.

    The ranks ask each other, so that they stop at the same step: call it on each, once per step.
    """
    return bool(_stop.requested())


def end(status: str = "ok", reason: str = "") -> None:
    """The training is over: ok, failed or preempted."""
    _meter.end(status, reason)


def _at_exit() -> None:
    _meter.exited()
    _meter.leave()


def _default_term() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _forget() -> None:
    """A forked child, such as a worker of a loader, is another process: nothing is measured."""
    global _meter, _stop
    _meter, _stop = _Nothing(), StopRequest()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
