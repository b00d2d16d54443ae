"""Probes of exercise 4.1: what DDP replicates, and what it averages."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.exercise.ranks import on_ranks
from jobkit.exercise.table import Table
from jobkit.units import MIB


def _step(rank: int, wrapped: bool) -> tuple[float, ...]:
    """The weight, the gradient and the new weight of one rank; weights begin unlike."""
    torch.manual_seed(rank)
    model: nn.Module = nn.Linear(1, 1, bias=False)
    if wrapped:
        model = DistributedDataParallel(model)
    (weight,) = model.parameters()
    before = weight.item()
    x = torch.full((4, 1), 1.0 + rank)
    model(x).sum().backward()
    assert weight.grad is not None
    gradient = weight.grad.item()
    with torch.no_grad():
        weight.sub_(weight.grad, alpha=0.1)
    return before, gradient, weight.item()


def gradients() -> list[Table]:
    """One step of a model with one weight, on two ranks with other data."""
    rows = [
        ("DDP" if wrapped else "plain model", rank, *values)
        for wrapped in (False, True)
        for rank, values in enumerate(on_ranks(_step, wrapped))
    ]
    return [
        Table(
            "a model of one weight; rank 0 has 4 samples of 1, rank 1 has 4 samples of 2",
            ("model", "rank", "weight", "gradient", "weight after a step"),
            rows,
        )
    ]


def _held(rank: int, world: int) -> tuple[object, ...]:
    """Bytes of the parameters and gradients of a DDP model."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    F.mse_loss(model(torch.randn(4, 512)), torch.zeros(4, 512)).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    held = sum(p.numel() * p.element_size() for p in parameters)
    grads = sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)
    return (world, rank, sum(p.numel() for p in parameters), held / MIB, grads / MIB)


def held() -> list[Table]:
    """What each rank holds at one, two and three ranks."""
    rows = [row for world in (1, 2, 3) for row in on_ranks(_held, world, world=world)]
    return [
        Table(
            "8 linear layers of 512 x 512 under DDP: held by each rank",
            ("ranks", "rank", "parameters", "parameters (MiB)", "gradients (MiB)"),
            rows,
        )
    ]
