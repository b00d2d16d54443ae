"""Measures a program that was not changed: by torch's optimizer hooks and its loaders' iterators.

Loaded by auto/sitecustomize.py in the package jobkit_auto, and never by name. A step of the
optimizer that stepped first is a step. Batches that loaders gave since the step before it are its
work, unless they were for evaluation: given without gradients, or in a pass over a loader that
ended before the step and had none. From the first request of such a pass to the next request for a
training batch the measurement is paused. What fails here ends it with a line, never the program.
"""

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from .process import Guarded, guarded

STEPS_INSIDE = 3  # a pass is for training after these, though it gives batches without gradients
OTHER_STEPS = 100  # of another optimizer, after which it is the one that counts


def size_of(batch: Any) -> int | None:
    """The samples of a batch: the first dimension of its first tensor; None if it has none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return graphs
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        sizes = (size_of(part) for part in batch)
        return next((size for size in sizes if size is not None), None)
    return None


class Pass:
    """One pass over a loader, from the creation of its iterator."""

    def __init__(self, iterator: Any, begin: float, wait: float) -> None:
        self._iterator = weakref.ref(iterator)  # a loop that breaks drops its iterator
        self.exhausted = False
        self.training = False  # a step was made in it
        self.evaluation = False  # batches were given without gradients
        self.inside = 0  # steps while it was the one that gave the last batch
        self.known = True  # the sizes of all its batches
        # Not attributed to a step yet:
        self.begin, self.wait, self.size = begin, wait, 0  # seconds of waiting, and samples
        self.asked = self.resumed = begin  # the last request, and the one after another pass's

    @property
    def ended(self) -> bool:
        """Whether it can give no more batches."""
        return self.exhausted or self._iterator() is None

    def judge(self, last: bool) -> None:
        """Decide at a step whether it is training; last: it gave the last batch before the step."""
        self.inside += last and not self.ended
        self.training = self.with_gradients and (self.training or not self.ended)

    @property
    def with_gradients(self) -> bool:
        """Whether its batches may be for training."""
        return not self.evaluation or self.inside >= STEPS_INSIDE


class Hook(Guarded):
    """The measurement of one process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.meter: Any = None
        self._counted: Any = None  # weak reference to the optimizer that counts
        self._others = 0  # steps of others since its last one
        self._passes: list[Pass] = []  # with requests since the last step, in their order
        self._loaders_only = True  # each step had a pass before it
        self.traced_step = False  # a step inside a compiled function, see after_step

    @guarded
    def asks(self, here: Pass, now: float, gradients: bool) -> None:
        """A batch is asked for."""
        if self.traced_step:
            self.traced_step = False
            self.step(now)
        if here.exhausted:  # the same iterator again
            here.exhausted, here.evaluation, here.inside = False, False, 0
        if not gradients and not here.evaluation:
            here.evaluation = True
            if self.meter:
                now = self.meter.idle() or now  # None: the meter has failed
        if here not in self._passes and not here.wait:
            here.begin = now
        if not self._passes or self._passes[-1] is not here:
            here.resumed = now
        self._passes = [each for each in self._passes if each is not here] + [here]
        here.asked = now

    @guarded
    def gave(self, here: Pass, batch: Any) -> None:
        """The batch is there."""
        size = size_of(batch)
        here.known = here.known and size is not None
        here.size += size or 0

    @guarded
    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
        counted = self._counted and self._counted()
        if counted is None or self._others >= OTHER_STEPS:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            self._others += 1
            return
        self._others = 0
        self.step(time.perf_counter())

    def step(self, now: float) -> None:
        """A step that counts: attribute to it what was asked for since the one before."""
        passes, self._passes = self._passes, []
        for each in passes:
            each.judge(each is passes[-1])
        training = [each for each in passes if each.training]
        # A loader may have one batch only, or be one ahead: then it has ended before the step.
        if not training and self._loaders_only:
            training = [each for each in passes[-1:] if each.with_gradients]
            for each in training:
                each.training = True
        if not self.meter:
            from . import meter  # the one beside this file, whatever meter the program has

            meter.start("samples", source="auto", environment=self.environment)
            self.meter = meter._meter  # which is nothing where it could not begin
            self.meter.begin(min((each.begin for each in training), default=None))
        if others := [each for each in passes if not each.training]:
            # Take evaluation out of the time: to the next request of a batch for training.
            after = (p.resumed for p in training if p.resumed > others[-1].asked)
            self.meter.exclude(min(each.begin for each in others), min(after, default=now))
        size = sum(each.size for each in training)
        known = bool(training) and all(each.known for each in training)
        for each in training:
            self.meter.waited(each.wait)
        for each in passes:
            each.wait, each.size = 0.0, 0
        self._loaders_only = self._loaders_only and bool(passes)
        self.meter.step(size if known else None)

    def give_up(self) -> None:
        """Measure no more."""
        self.on = False
        if self.meter:
            self.meter.leave()


hook: Any = None  # a Hook, once a module of torch was imported
torch: Any = None


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook of all optimizers."""
    if torch.compiler.is_compiling():
        # Traced, with no break of the graph: the compiled function does this assignment at each
        # call, and the next request for a batch sees it.
        hook.traced_step = True
        return
    hook.stepped(optimizer)


def attach(module: Any, environment: Mapping[str, str]) -> None:
    """Measure with a module of torch that was just imported."""
    global hook, torch
    torch = sys.modules["torch"]
    if hook is None:
        hook = Hook(environment)
        os.register_at_fork(after_in_child=_in_child)
    if module.__name__ == "torch.optim.optimizer":
        module.register_optimizer_step_post_hook(after_step)
    else:
        _patch_loader(module)


def _patch_loader(module: Any) -> None:
    """Time the iterators of all loaders; they stay the objects that they are."""
    base, loader = module._BaseDataLoaderIter, module.DataLoader
    plain_next, plain_iter = base.__next__, loader.__iter__

    @functools.wraps(plain_iter)
    def __iter__(self: Any) -> Any:
        begin = time.perf_counter()
        if hook.on and hook.meter and not torch.is_grad_enabled():  # evaluation begins
            begin = hook.meter.idle() or begin
        iterator = plain_iter(self)
        with contextlib.suppress(Exception):
            iterator._jobkit_pass = Pass(iterator, begin, time.perf_counter() - begin)
        return iterator

    @functools.wraps(plain_next)
    def __next__(self: Any) -> Any:
        here = getattr(self, "_jobkit_pass", None)
        if here is None or not hook.on:
            return plain_next(self)
        begin = time.perf_counter()
        hook.asks(here, begin, torch.is_grad_enabled())
        try:
            batch = plain_next(self)
        except StopIteration:
            here.exhausted = True
            raise
        finally:
            here.wait += time.perf_counter() - begin
        hook.gave(here, batch)
        return batch

    base.__next__, loader.__iter__ = __next__, __iter__


def _in_child() -> None:
    """A forked process: a worker of a loader, or one rank, which begins from nothing."""
    global hook
    hook = Hook(hook.environment)


def step_aside() -> None:
    """The program has its own meter: leave the measurement to it."""
    if hook:
        hook.give_up()
