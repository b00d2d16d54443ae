"""What strategies do to a model or a batch around a pass: recompute, fill up, keep statistics.

A rank with no samples still takes part in collectives, and a schedule of a pipeline has batches of
one size: both run the model on samples that are made up or taken again. Their losses have no
weight, but a normalisation would remember them.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def children_of(model: nn.Module) -> Iterator[nn.Module]:
    """The direct children; of a list of modules, which is never called itself, its own."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from children_of(child)
        else:
            yield child


def checkpoint_blocks(model: nn.Module) -> None:
    """Make each child with parameters keep its input only, and be computed again backward.

    The forward is replaced inside the module, so that the hooks of a wrapper, which gather
    parameters, run outside of it, once in each direction.
    """
    for block in children_of(model):
        if any(True for _ in block.parameters()):
            how: dict[str, Any] = {"use_reentrant": False}
            if any(isinstance(module, _BatchNorm) for module in block.modules()):
                # Running statistics have seen the batch already: the second forward must not
                # count it.
                how["context_fn"] = lambda block=block: (nullcontext(), kept_statistics(block))
            block.forward = functools.partial(checkpoint, block.forward, **how)


@contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch normalisation as they are."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def filled_up(images: Tensor, parts: int) -> Tensor:
    """The images and as many of them again as make equal parts; none at all: blank ones.

    images: (N, 3, 32, 32); returns (M, 3, 32, 32), M the next multiple of parts, parts for N = 0.
    """
    count, lack = len(images), -len(images) % parts
    if not count:
        return images.new_zeros(parts, *images.shape[1:])
    again = torch.arange(lack, device=images.device) % count
    return torch.cat([images, images[again]]) if lack else images
