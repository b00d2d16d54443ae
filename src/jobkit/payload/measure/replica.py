"""The communication-free replica: what a breakdown compares an iteration's passes with.

It is the run's model under the same wrapper, on a group of this rank alone. So the wrapper's own
work (hooks, copies into buckets) is in both, and the difference is communication. On each GPU it
takes the memory of a whole model, which a sharded run may not have: every rank must have shown
that it does, and an error for lack of memory ends the replica on all ranks, never the run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from jobkit.payload.batches import Step
from jobkit.payload.distributed import all_or_raise
from jobkit.units import MIB

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

T = TypeVar("T")
# Whole models in fp32 that a replica may hold: FSDP's parameters, gathered once more, and its
# gradients, whole and reduced. DDP's holds two.
_COPIES, _FP32_BYTES = 4, 4
# Passes before those that are measured: the first ones fill caches, and may compile kernels.
_FEWEST_WARM, _MOST_WARM, _AGREE = 3, 8, 0.1


class NoReplica(Exception):
    """There is no memory for a replica, on one rank at least; raised on every rank."""


class Replica:
    """The replica of one rank."""

    def __init__(self, trainer: "Trainer", make_model: Callable[[], nn.Module]) -> None:
        """Every rank calls. make_model: makes the bare model. Raises NoReplica."""
        self._trainer = trainer
        _on_all_ranks(trainer, lambda: _refuse_a_shortage(trainer))
        alone = dist.new_group([trainer.group.place.rank], use_local_synchronization=True)
        assert isinstance(alone, dist.ProcessGroup)

        def make() -> nn.Module:
            with random_kept(trainer.group.device):
                return trainer.strategy.replica(make_model(), alone).train()

        trainer.peak.pause()
        try:
            self._model = _on_all_ranks(trainer, make)
        except NoReplica:
            trainer.peak.resume()
            raise

    def warm_up(self, step: Step) -> None:
        """Make passes until two in a row take equally long on every rank. NoReplica."""
        before = float("inf")
        for done in range(1, _MOST_WARM + 1):
            now = self.seconds(step)
            settled = done >= _FEWEST_WARM and abs(now - before) <= _AGREE * before
            before = now
            if all(self._trainer.group.gather(settled)):
                return

    def seconds(self, step: Step) -> float:
        """Seconds of an iteration's forward and backward pass. Every rank calls; NoReplica."""
        watch = self._trainer.strategy.stopwatch
        watch.on = True
        try:
            _on_all_ranks(self._trainer, lambda: self._passes(step))
        finally:
            watch.on = False
            taken = watch.take()
        return taken["alone"]

    def _passes(self, step: Step) -> None:
        trainer = self._trainer
        strategy = trainer.strategy
        weight = strategy.data_world_size / step.global_count
        with random_kept(strategy.device):
            for j, indices in enumerate(step.micro_batches):
                images, labels = trainer.data.training_batch(
                    indices, trainer.progress.epoch, step.crops_of(j)
                )
                last = j == len(step.micro_batches) - 1
                with strategy.stopwatch.part("alone"):
                    strategy.pass_alone(self._model, images, labels, weight, last)
        self._model.zero_grad(set_to_none=True)

    def free(self) -> None:
        """Give the memory back."""
        del self._model
        self._trainer.peak.resume()


def random_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state afterwards."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors can still have on the GPU; None on the CPU, where it is not known."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def needed_bytes(trainer: "Trainer") -> int:
    """Bytes that the replica takes at most: whole models, and what an iteration takes besides."""
    device, taken = trainer.group.device, 0
    if device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return _COPIES * _FP32_BYTES * trainer.strategy.parameter_count + taken


def _refuse_a_shortage(trainer: "Trainer") -> None:
    free, needed = free_bytes(trainer.group.device), needed_bytes(trainer)
    if free is not None and free < needed:
        rank = trainer.group.place.rank
        raise NoReplica(f"rank {rank} has {free / MIB:.0f} MiB free of {needed / MIB:.0f} MiB")


def _on_all_ranks(trainer: "Trainer", act: Callable[[], T]) -> T:
    """This rank's result; NoReplica on all ranks where memory is missing on one.

    act communicates with no other rank, so that one that fails leaves none waiting.
    """
    found: list[T] = []

    def attempt() -> None:  # the ranks tell each other of success, not of the result
        try:
            found.append(act())
        except RuntimeError as error:
            if not _lacks_memory(error):
                raise
            rank, first = trainer.group.place.rank, str(error).splitlines()[0]
            raise NoReplica(f"rank {rank} is out of memory: {first[:200]}") from None

    all_or_raise(trainer.group.gather, attempt, NoReplica)
    return found[0]


def _lacks_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    known = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in known)
