"""Lookahead: every few steps the weights move back to a slow average of themselves."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from jobkit.payload.schedule import total_steps

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_DECAY = 0.95  # of the average, per step, at the end of the training


def decay(every: int, share: float) -> float:
    """The part that the average keeps of itself when `every` more steps are averaged in.

    share: of the training that is done, 0 to 1. Near 0 at first, so that the average follows the
    weights, then rising with the cube of the share (Keller Jordan, arXiv 2404.00498).
    """
    return float(_DECAY**every * share**3)


class Lookahead:
    """Slow weights beside a trainer's own, averaged after its optimizer's steps.

    They are in the optimizer's state of each parameter, as `slow`: so they are sharded as it is,
    counted in memory, and in checkpoints. They begin as the weights after the first step. The
    method is Zhang et al., "Lookahead Optimizer" (arXiv 1907.08610), with a decay that rises.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._every = trainer, trainer.spec.lookahead_every
        trainer.optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and "slow" not in optimizer.state[parameter]:
                    optimizer.state[parameter]["slow"] = parameter.detach().clone()
        share = self._share_done()
        if (self._trainer.progress.iteration + 1) % self._every == 0 or share == 1:
            move(optimizer.state.items(), decay(self._every, share))

    def _share_done(self) -> float:
        """The share of the training that is done with this step, 1 after the last one."""
        trainer = self._trainer
        batches, progress = trainer.batches, trainer.progress
        position = min(progress.position + batches.batch_size, batches.samples)
        per_epoch = len(batches)
        epochs = total_steps(trainer.spec, per_epoch) / per_epoch
        return min(1.0, (progress.epoch + position / batches.samples) / epochs)


def move(state: Iterable[tuple[Tensor, dict[str, Tensor]]], kept: float) -> None:
    """Average each parameter into its slow weights, which keep a part; make it equal to them."""
    for parameter, own in state:
        if "slow" in own:
            own["slow"].lerp_(parameter, 1 - kept)
            parameter.copy_(own["slow"])
