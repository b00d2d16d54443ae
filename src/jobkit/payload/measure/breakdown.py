"""Breakdown of an iteration's time, measured during the training without changing it.

Exposed communication is the part of an iteration that is not overlapped with computation. It is
measured with a communication-free replica: next to an iteration of the training its forward and
backward pass is repeated on a copy of the model, under the same wrapper on a group of one rank, and
the time by which the training's pass takes longer is exposed. Which of the two comes first
alternates. The replica has its own weights, and the random state is restored: the training stays
bitwise equal. Where there is no memory for a replica, there is no breakdown.

A pipeline's stage has no such replica. There the time inside its stages' passes is measured, and
the rest of the schedule is exposed: waiting for other stages, and the bubble.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from jobkit.payload.clock import Stopwatch
from jobkit.payload.data.batches import Step
from jobkit.payload.measure.replica import NoReplica, Replica
from jobkit.payload.strategies.base import optimizer_of

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_FEWEST = 3  # iterations from which means are worth a record


@dataclass(frozen=True)
class Parts:
    """Seconds of one iteration on one rank."""

    wall: float
    data_wait: float
    passes: float  # forward and backward, waiting included
    alone: float  # the same without communication
    step: float  # of the optimizer, with its communication
    own_step: float  # of it: what this rank computes


class Breakdown:
    """Measures some iterations of one rank; all ranks measure the same ones."""

    def __init__(self, wanted: int, make_replica: Callable[[], nn.Module]) -> None:
        """wanted: iterations. make_replica: makes the bare model of the replica."""
        self._wanted, self._make_replica = wanted, make_replica
        self._replica: Replica | None = None
        self._hooks: list[RemovableHandle] = []
        self._found: list[Parts] = []
        self._begin = (0.0, 0.0)
        self._alone_s = 0.0
        self._how = "nothing"
        self._ready = self._done = False

    def wants(self, trainer: "Trainer") -> bool:
        """Whether more iterations are to be measured."""
        # Neither iterations that a profiler slows down, nor those it compares with.
        others = (each for each in trainer.observers if each is not self)
        begun = trainer.begun  # after an iteration, which shows the memory that one takes
        return begun and not self._done and not any(each.wants(trainer) for each in others)

    def before(self, trainer: "Trainer", step: Step) -> None:
        """See Observer."""
        with trainer.clock.paused():
            if not self._ready:
                self._get_ready(trainer)
            if len(self._found) % 2 == 0:
                self._run_alone(trainer, step)
            dist.barrier()  # the replica's passes must not count as waiting
            trainer.strategy.stopwatch.take()
            trainer.strategy.stopwatch.on = True
        self._begin = trainer.clock.so_far()[1:]

    def after(self, trainer: "Trainer", step: Step) -> None:
        """See Observer."""
        end = trainer.clock.so_far()[1:]
        with trainer.clock.paused():
            trainer.strategy.stopwatch.on = False
            parts = trainer.strategy.stopwatch.take()
            if len(self._found) % 2 == 1:
                self._run_alone(trainer, step)
            if self._done:  # for lack of memory
                return
            by = {"replica": self._alone_s, "inside": parts["inside"], "nothing": parts["passes"]}
            self._found.append(
                Parts(
                    wall=end[0] - self._begin[0],
                    data_wait=end[1] - self._begin[1],
                    passes=parts["passes"],
                    alone=by[self._how],
                    step=parts["step"],
                    own_step=parts["own_step"] if self._hooks else parts["step"],
                )
            )
            if len(self._found) == self._wanted:
                self.finish(trainer)

    def _get_ready(self, trainer: "Trainer") -> None:
        self._ready = True
        strategy = trainer.strategy
        if trainer.spec.zero1:  # its step sends parameters to the other ranks
            self._hooks = _time_own_step(optimizer_of(trainer.optimizer), strategy.stopwatch)
        if trainer.group.place.world_size > 1:  # one rank does not communicate
            self._how = strategy.measured_by
        if self._how == "replica":
            try:
                self._replica = Replica(trainer, self._make_replica)
            except NoReplica as reason:
                self._give_up(trainer, str(reason))

    def _run_alone(self, trainer: "Trainer", step: Step) -> None:
        """Measure the iteration's forward and backward pass on the replica, if there is one."""
        if self._replica is not None:
            try:
                self._alone_s = self._replica.seconds(step)
            except NoReplica as reason:
                self._give_up(trainer, str(reason))

    def _give_up(self, trainer: "Trainer", reason: str) -> None:
        """Measure no more, and say why. Every rank calls."""
        self._end()
        trainer.report.info(f"no breakdown: no memory for the communication-free replica: {reason}")

    def _end(self) -> None:
        """Remove the hooks and the replica."""
        self._done = True
        for hook in self._hooks:
            hook.remove()
        if self._replica is not None:
            self._replica.free()
            self._replica = None

    def finish(self, trainer: "Trainer") -> None:
        """Record the breakdown and free the replica. Every rank calls."""
        if self._done:
            return
        self._end()
        if len(self._found) < _FEWEST:
            trainer.report.log(f"no breakdown: {len(self._found)} iterations were measured")
            return
        everyone: list[list[Parts]] = trainer.group.gather(self._found)
        kept = _usual([max(ranks, key=_wall).wall for ranks in zip(*everyone, strict=True)])
        means = [_means([found[i] for i in kept]) for found in everyone]
        own = means[trainer.group.place.rank]
        trainer.report.log(f"breakdown, this rank, seconds per iteration: {own}")
        trainer.report.record("breakdown", iterations=len(kept), **_over_ranks(means))


def _time_own_step(optimizer: Optimizer, watch: Stopwatch) -> list[RemovableHandle]:
    """Have the stopwatch measure an optimizer's own step, inside its wrapper's."""
    running: list[AbstractContextManager[None]] = []

    def begin(*_: Any) -> None:
        running.append(watch.part("own_step"))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]


def _wall(parts: Parts) -> float:
    return parts.wall


def _usual(walls: list[float]) -> list[int]:
    """The indices of the middle half of the iterations by time: robust against outliers."""
    order, cut = sorted(range(len(walls)), key=walls.__getitem__), len(walls) // 4
    return order[cut : len(order) - cut]


def _means(found: list[Parts]) -> dict[str, float]:
    """Seconds per iteration by part, of one rank: means over iterations."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(parts, name) for parts in found)

    wall, wait, passes = mean("wall"), mean("data_wait"), mean("passes")
    step, own_step = mean("step"), min(mean("own_step"), mean("step"))
    exposed = min(
        max(passes - mean("alone"), 0.0), passes
    )  # of two equal ones, either may be longer
    return {
        "compute": passes - exposed + own_step,
        "communication": exposed + step - own_step,
        "data_wait": wait,
        "other": max(wall - wait - passes - step, 0.0),
        "wall": wall,
    }


def _over_ranks(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The fields of the breakdown record; see metric.line.KINDS."""
    means = {
        f"{part}_s": statistics.fmean(rank[part] for rank in ranks)
        for part in ("compute", "communication", "data_wait", "other")
    }
    useful = [rank["compute"] + rank["other"] for rank in ranks]
    busy = [u + rank["data_wait"] for u, rank in zip(useful, ranks, strict=True)]
    return means | {
        "iteration_s": max(rank["wall"] for rank in ranks),
        "useful_max_s": max(useful),
        "busy_max_s": max(busy),
    }
