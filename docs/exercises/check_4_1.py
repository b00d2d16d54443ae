"""Check of exercise 4.1: the weights and gradients of two ranks with different data."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from checking import MissingError, load, main
from ranks import gather

TOLERANCE = 1e-5  # sums of two ranks in fp32, in another order


def flat(tensors):
    """All values of some tensors, of which one may be absent."""
    return torch.cat([torch.zeros(0) if t is None else t.detach().flatten() for t in tensors])


def apart(values):
    """The largest difference between the ranks' tensors."""
    first, other = (torch.tensor(part) for part in gather(values.tolist()))
    return float((first - other).abs().max()) if len(first) == len(other) > 0 else float("inf")


def work(rank, path):
    """Two steps of training: the second one begins with weights that the first one made."""
    mine = load(path, "get_ddp_model")
    torch.manual_seed(rank)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model = mine.get_ddp_model(plain, torch.device("cpu"))
    if not isinstance(model, nn.Module):
        raise MissingError(f"get_ddp_model() returned {type(model).__name__}, and no model")
    result = {"weights": apart(flat(model.parameters())), "gradients": 0.0, "off": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))
        replica = copy.deepcopy(getattr(model, "module", model))
        replica.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        mean = torch.tensor(gather(flat(p.grad for p in replica.parameters()).tolist())).mean(0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = flat(p.grad for p in model.parameters())
        result["gradients"] = max(result["gradients"], apart(gradients))
        result["off"] = max(result["off"], float((gradients - mean).abs().max()))
        optimizer.step()
    return result | {"after": apart(flat(model.parameters()))}


def judge(results):
    worst = {name: max(result[name] for result in results) for name in results[0]}
    off = {name: f"they differ by up to {value:.2g}" for name, value in worst.items()}
    return [
        (worst["weights"] == 0, "both ranks begin with the same weights", off["weights"]),
        (worst["gradients"] == 0, "both ranks have the same gradients", off["gradients"]),
        (worst["off"] <= TOLERANCE, "the gradients are the mean over the ranks", off["off"]),
        (worst["after"] == 0, "both ranks have the same weights after two steps", off["after"]),
    ]


if __name__ == "__main__":
    main(work, judge)
