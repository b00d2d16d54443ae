"""Check of exercise 4.1: the weights and gradients of two ranks with different data."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from checking import load
from ranks import gather, join_group

TOLERANCE = 1e-5  # sums of two ranks in fp32, in another order


def flat(tensors):
    """All values of some tensors, of which one may be absent."""
    return torch.cat([torch.zeros(0) if t is None else t.detach().flatten() for t in tensors])


def apart(values):
    """The largest difference between the ranks' tensors."""
    first, other = gather(values)
    return float((first - other).abs().max()) if len(first) == len(other) > 0 else float("inf")


def work(rank, path):
    """Two steps of training: the second one begins with weights that the first one made."""
    join_group(rank, 2)
    mine = load(path, "get_ddp_model")
    torch.manual_seed(rank)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model = mine.get_ddp_model(plain, torch.device("cpu"))
    if not isinstance(model, nn.Module):
        raise LookupError(f"get_ddp_model() returned {type(model).__name__}, and no model")
    weights, gradients, off = apart(flat(model.parameters())), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))
        replica = copy.deepcopy(getattr(model, "module", model))
        replica.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        mean = sum(gather(flat(p.grad for p in replica.parameters()))) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradient = flat(p.grad for p in model.parameters())
        gradients.append(apart(gradient))
        off.append(max(gather(float((gradient - mean).abs().max()))))
        optimizer.step()
    by, after = "they differ by up to", apart(flat(model.parameters()))
    return [
        (weights == 0, "both ranks begin with the same weights", f"{by} {weights:.2g}"),
        (max(gradients) == 0, "both ranks have the same gradients", f"{by} {max(gradients):.2g}"),
        (max(off) <= TOLERANCE, "the gradients are the mean over the ranks",
         f"{by} {max(off):.2g}"),
        (after == 0, "both ranks have the same weights after two steps", f"{by} {after:.2g}"),
    ]  # fmt: skip
