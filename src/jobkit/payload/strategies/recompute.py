"""Activation checkpointing: a block keeps its input only, and is computed again going backward."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


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
    return nullcontext(), _frozen_statistics(block)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Running statistics have seen the batch already: the second forward must not count it."""
    layers = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    kept = [{name: buffer.clone() for name, buffer in m.named_buffers()} for m in layers]
    try:
        yield
    finally:
        for layer, before in zip(layers, kept, strict=True):
            for name, buffer in layer.named_buffers():
                buffer.copy_(before[name])
