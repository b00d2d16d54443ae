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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from jobkit.payload.batches import Step
from jobkit.payload.measure.parts import FEWEST, Parts, means, record
from jobkit.payload.measure.replica import NoReplica, Replica
from jobkit.payload.measure.waiting import WAITED, Undo, stop_timing, time_waits

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer


class Breakdown:
    """Measures some iterations of one rank; all ranks measure the same ones."""

    def __init__(self, wanted: int, make_replica: Callable[[], nn.Module]) -> None:
        """wanted: iterations. make_replica: makes the bare model of the replica."""
        self._wanted, self._make_replica = wanted, make_replica
        self._replica: Replica | None = None
        self._found: list[Parts] = []
        self._waits: list[Undo] | None = None  # the timers of this iteration
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
                self._get_ready(trainer, step)
            if len(self._found) % 2 == 0:
                self._run_alone(trainer, step)
            self._waits = self._time_waits(trainer)
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
            stop_timing(self._waits)
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
                    waited=None if self._waits is None else parts[WAITED],
                )
            )
            if len(self._found) == self._wanted:
                self.finish(trainer)

    def _time_waits(self, trainer: "Trainer") -> list[Undo] | None:
        """Measure the iteration's communication a second time, where there is a way."""
        if self._how != "replica":
            return None
        strategy, replicas = trainer.strategy, trainer.spec.fsdp_hybrid_replicas
        return time_waits(strategy.model, strategy.stopwatch, replicas)

    def _get_ready(self, trainer: "Trainer", step: Step) -> None:
        self._ready = True
        strategy = trainer.strategy
        if trainer.group.place.world_size > 1:  # one rank does not communicate
            self._how = strategy.measured_by
        if self._how == "replica":
            try:
                self._replica = Replica(trainer, self._make_replica)
                self._replica.warm_up(step)
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
        """Remove the replica."""
        self._done = True
        if self._replica is not None:
            self._replica.free()
            self._replica = None

    def finish(self, trainer: "Trainer") -> None:
        """Record the breakdown and free the replica. Every rank calls."""
        if self._done:
            return
        self._end()
        if len(self._found) < FEWEST:
            trainer.report.log(f"no breakdown: {len(self._found)} iterations were measured")
            return
        everyone: list[list[Parts]] = trainer.group.gather(self._found)
        own = means(everyone[trainer.group.place.rank])
        trainer.report.log(f"breakdown, this rank, seconds per iteration: {own}")
        fields = record(everyone)
        trainer.report.record("breakdown", **fields)
        if fields["certain"] is False:
            trainer.report.say(_doubt(fields))


def _doubt(fields: dict[str, Any]) -> str:
    """That the two measures of communication do not agree."""
    replica, direct = 1000 * fields["communication_s"], 1000 * fields["communication_direct_s"]
    return (
        f"the breakdown is not certain: exposed communication is {replica:.3g} ms per iteration by "
        f"the comparison with a replica, {direct:.3g} ms by the time in which the passes wait"
    )
