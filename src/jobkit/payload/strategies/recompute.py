"""Activation checkpointing: a block keeps its input only, and is computed again going backward."""

import functools
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from jobkit.payload.strategies.statistics import kept_statistics


def checkpoint_blocks(model: nn.Module) -> None:
    """Make each direct child of the model that has parameters such a block; names stay.

    The forward is replaced inside the module, so that the hooks of a wrapper, which gather
    parameters, run outside of it, once in each direction.
    """
    for block in model.children():
        if any(True for _ in block.parameters()):
            block.forward = functools.partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                context_fn=functools.partial(_contexts, block),
            )


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # Running statistics have seen the batch already: the second forward must not count it.
    return nullcontext(), kept_statistics(block)
