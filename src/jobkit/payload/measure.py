"""What communication costs an iteration of ranks with copies of a model: passes with and without.

Spans say how long communication is exposed. On a CPU it also slows the computing that overlaps it,
and DDP's own work on its buckets is neither. So once in a run the passes of one iteration are
repeated on the run's own model, with all-reduce and without (`no_sync`), in turn. Gradients are
thrown away, random state and running statistics are kept: the training stays bitwise equal.
"""

import statistics
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from jobkit.payload.batches import Step
from jobkit.payload.strategies.blocks import kept_statistics
from jobkit.program.process import synchronised_s

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

PAIRS, WARM_UP, MAX_PASS_S = 4, 1, 5.0  # a pass that is longer would cost too much of a run


def measure_difference(trainer: "Trainer", step: Step) -> None:
    """Record by how much the passes of an iteration that is done take longer with all-reduce."""
    trainer.after_step = [other for other in trainer.after_step if other is not measure_difference]
    device, model, differences = trainer.data.device, trainer.strategy.model, list[float]()
    shares_buffers = getattr(model, "require_forward_param_sync", None)  # of DDP
    devices = [device] if device.type == "cuda" else []
    trainer.windows.pause()
    with torch.random.fork_rng(devices), kept_statistics(model):
        for turn in range(WARM_UP + PAIRS):
            order = (True, False) if turn % 2 else (False, True)
            seconds = {synced: _pass_s(trainer, step, synced) for synced in order}
            if max(trainer.group.gather(max(seconds.values()))) > MAX_PASS_S:
                break
            differences += [seconds[True] - seconds[False]] * (turn >= WARM_UP)
        if shares_buffers is not None:
            model.require_forward_param_sync = shares_buffers  # a pass of no_sync ends it
        if differences:
            mean = statistics.fmean(trainer.group.gather(statistics.fmean(differences)))
            pairs = len(differences)
            trainer.report.record("difference", difference_s=max(0.0, mean), pairs=pairs)
    trainer.windows.resume()


def _pass_s(trainer: "Trainer", step: Step, synced: bool) -> float:
    """Seconds of the iteration's forward and backward passes; their gradients are thrown away."""
    strategy, parts = trainer.strategy, zip(step.micro_batches, step.crops, strict=True)
    epoch, weight = trainer.progress.epoch, strategy.data_world_size / step.global_count
    batches = [trainer.data.training_batch(indices, epoch, crops) for indices, crops in parts]
    dist.barrier()  # what one rank did before is no waiting
    begin = synchronised_s()
    for j, (images, labels) in enumerate(batches, 1):
        strategy.forward_backward(images, labels, weight, last=synced and j == len(batches))
    seconds = synchronised_s() - begin
    strategy.model.zero_grad(set_to_none=True)
    return seconds
