"""Check of exercise 4.1: the weights and gradients of two ranks with different data."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.exercise.checks.judge import MissingError, Remark, check, load, remark
from jobkit.exercise.ranks import gather

_NEAR = 1e-5  # sums of two ranks in fp32, in another order


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(0) if t is None else t.detach().flatten() for t in tensors])


def _apart(mine: Tensor) -> float:
    """The largest difference between the ranks' tensors."""
    first, other = (torch.tensor(values) for values in gather(mine.tolist()))
    return float((first - other).abs().max()) if len(first) == len(other) > 0 else float("inf")


def work(rank: int, path: str) -> dict[str, Any]:
    """Two steps of training: the second one begins with weights that the first one made."""
    mine = load(path, "get_ddp_model")
    torch.manual_seed(rank)
    made = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    count = sum(p.numel() for p in made.parameters())
    model = mine.get_ddp_model(made, torch.device("cpu"))
    if not isinstance(model, nn.Module):
        raise MissingError(f"get_ddp_model() returned {type(model).__name__}, and no model")
    weights = _apart(_flat(list(model.parameters())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, off = [], []
    for step in range(2):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))
        replica = copy.deepcopy(getattr(model, "module", model))
        replica.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        own = gather(_flat([p.grad for p in replica.parameters()]).tolist())
        mean = torch.tensor(own).mean(0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found = _flat([p.grad for p in model.parameters()])
        gradients.append(_apart(found))
        off.append(float((found - mean).abs().max()))
        optimizer.step()
        del step
    held = sum(p.numel() for p in model.parameters())
    after = _apart(_flat(list(model.parameters())))
    return {
        "count": count,
        "held": held,
        "weights": weights,
        "gradients": max(gradients),
        "off": max(off),
        "after": after,
    }


def judge(found: Sequence[dict[str, Any]]) -> list[Remark]:
    """Say of each promise whether it is kept."""
    most = {name: max(each[name] for each in found) for name in found[0]}
    return [
        remark(
            most["weights"] == 0,
            "both ranks begin with the same weights",
            f"the ranks begin with different weights: they differ by up to {most['weights']:.2g}",
        ),
        remark(
            most["gradients"] == 0,
            "after backward() both ranks have the same gradients",
            f"after backward() the ranks' gradients differ by up to {most['gradients']:.2g}",
        ),
        remark(
            most["off"] <= _NEAR,
            "the gradients are the mean over the ranks",
            f"the gradients are up to {most['off']:.2g} away from the mean over the ranks",
        ),
        remark(
            most["after"] == 0,
            "after two steps both ranks have the same weights",
            f"after two steps the ranks' weights differ by up to {most['after']:.2g}",
        ),
    ]


def run(path: str) -> list[Remark]:
    """Check a file."""
    return check(path, work, judge)
