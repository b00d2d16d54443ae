"""Exercise 4.1: what DDP replicates, and what it averages."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import MIB, main, on_ranks


def step(rank, wrapped):
    """The weight, the gradient and the new weight of a rank; the weights begin unlike."""
    torch.manual_seed(rank)
    model = nn.Linear(1, 1, bias=False)
    if wrapped:
        model = DistributedDataParallel(model)
    (weight,) = model.parameters()
    before = weight.item()
    model(torch.full((4, 1), 1.0 + rank)).sum().backward()
    gradient = weight.grad.item()
    with torch.no_grad():
        weight.sub_(weight.grad, alpha=0.1)
    return before, gradient, weight.item()


def gradients():
    rows = [
        ("DDP" if wrapped else "plain model", rank, *values)
        for wrapped in (False, True)
        for rank, values in enumerate(on_ranks(step, wrapped))
    ]
    title = "a model of one weight; rank 0 has 4 samples of 1, rank 1 has 4 samples of 2"
    return title, ("model", "rank", "weight", "gradient", "weight after a step"), rows


def hold(rank, world):
    """MiB of the parameters and gradients of a DDP model."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    model(torch.randn(4, 512)).sum().backward()
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters())
    return world, rank, weights / MIB, gradients / MIB


def held():
    rows = [row for world in (1, 2, 3) for row in on_ranks(hold, world, world=world)]
    head = ("ranks", "rank", "parameters (MiB)", "gradients (MiB)")
    return "8 linear layers of 512 x 512 under DDP: held by each rank", head, rows


if __name__ == "__main__":
    main(gradients, held)
