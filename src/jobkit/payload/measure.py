"""What communication costs a ddp iteration, by difference: its passes with and without it.

Spans say how long communication is exposed. On a CPU it also slows the computing that overlaps it,
and DDP's own work on its buckets is neither. So once in a run the passes of one iteration are
repeated on the run's own model, with all-reduce and without (`no_sync`), in turn. Gradients are
thrown away, random state and running statistics are kept: the training stays bitwise equal.
"""

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jobkit.payload.batches import Step
from jobkit.payload.strategies.blocks import kept_statistics

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

PAIRS, WARM_UP, MAX_PASS_S = 4, 1, 5.0  # a pass that is longer would cost too much of a run


class Difference:
    """Measures one iteration after the warm-up; every rank measures the same one."""

    def __init__(self) -> None:
        self._done = False

    def wants(self, trainer: "Trainer") -> bool:
        spec = trainer.spec
        # PowerSGD keeps what it left out; a compiled graph is of one kind of pass only.
        fits = spec.ddp_comm_hook != "powersgd" and not spec.compile
        ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        many = trainer.group.place.world_size > 1
        return bool(spec.why and ddp and many and fits and trainer.begun and not self._done)

    def before(self, trainer: "Trainer", step: Step) -> None:
        self._done = True
        strategy = trainer.strategy
        model = strategy.model
        assert isinstance(model, DistributedDataParallel)
        devices = [strategy.device] if strategy.device.type == "cuda" else []
        with trainer.clock.paused(), torch.random.fork_rng(devices), kept_statistics(model):
            shares_buffers = model.require_forward_param_sync
            differences: list[float] = []
            for turn in range(WARM_UP + PAIRS):
                order = (True, False) if turn % 2 else (False, True)
                seconds = {synced: _passes(trainer, step, synced) for synced in order}
                if max(trainer.group.gather(max(seconds.values()))) > MAX_PASS_S:
                    break
                differences += [seconds[True] - seconds[False]] * (turn >= WARM_UP)
            model.require_forward_param_sync = shares_buffers  # a pass of no_sync ends it
        if differences:
            mean = statistics.fmean(trainer.group.gather(statistics.fmean(differences)))
            pairs = len(differences)
            trainer.report.record("difference", difference_s=max(0.0, mean), pairs=pairs)

    def after(self, trainer: "Trainer", step: Step) -> None:
        pass


def _passes(trainer: "Trainer", step: Step, synced: bool) -> float:
    """Seconds of the iteration's forward and backward passes; their gradients are thrown away."""
    strategy, last = trainer.strategy, len(step.micro_batches) - 1
    weight = strategy.data_world_size / step.global_count
    batches = [
        trainer.data.training_batch(indices, trainer.progress.epoch, step.crops[j])
        for j, indices in enumerate(step.micro_batches)
    ]
    dist.barrier()  # what one rank did before is no waiting
    begin = _now(strategy.device)
    for j, (images, labels) in enumerate(batches):
        strategy.forward_backward(images, labels, weight, last=synced and j == last)
    seconds = _now(strategy.device) - begin
    strategy.model.zero_grad(set_to_none=True)
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
