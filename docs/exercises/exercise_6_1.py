"""Exercise 6.1: gradients that add up, memory of a validation, modes, and means."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from jobkit.payload.model import CNN
from ranks import MIB, main, on_ranks

IMAGES = 256


def norms(clears):
    """The norm of the gradient and the loss at each of some steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    for _ in range(6):
        if clears:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), loss.item()
        optimizer.step()


def gradients():
    steps = zip(range(6), norms(True), norms(False), strict=True)
    rows = [(i, a[0], b[0], a[1], b[1]) for i, a, b in steps]
    head = ("step", "norm with zero_grad", "norm without", "loss with zero_grad", "loss without")
    return "steps on the same batch: norm of the gradient, and loss", head, rows


def memory():
    """All tensors that a validation pass keeps for a backward pass, each storage once."""
    model, images, rows = CNN(10).eval(), torch.randn(IMAGES, 3, 32, 32), []
    for no_grad in ("yes", "no"):
        kept = {}

        def keep(tensor, kept=kept):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.set_grad_enabled(no_grad == "no"), hooks:
            model(images)
        rows.append((no_grad, sum(kept.values()) / MIB))
    return f"the CNN on a batch of {IMAGES}", ("no_grad", "kept for backward (MiB)"), rows


def modes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5))
    norm, x, rows = model[1], torch.randn(64, 16), []
    for name in ("train", "eval"):
        model.train(name == "train")
        before = norm.running_mean.clone()
        with torch.no_grad():
            first, second = model(x), model(x)
        zeros = 100 * (first == 0).double().mean().item()
        moved = (norm.running_mean - before).abs().max().item()
        rows.append((name, zeros, (first - second).abs().max().item(), moved))
    head = ("mode", "zeros in the output (%)", "two passes differ by", "running mean moves by")
    return "one batch twice through batch normalisation, ReLU and dropout of 50 %", head, rows


def losses(rank):
    """A rank's own validation loss, the mean of the ranks' means, and the mean of all samples."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    x, y = torch.randn(20, 8), torch.randint(3, (20,))
    mine = slice(0, 16) if rank == 0 else slice(16, 20)
    with torch.no_grad():
        total = F.cross_entropy(model(x[mine]), y[mine], reduction="sum").item()
        alone = F.cross_entropy(model(x), y).item()
    count = len(y[mine])
    sums = torch.tensor([total / count, total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    of_means, of_sums = sums[0] / dist.get_world_size(), sums[1] / sums[2]
    return rank, count, total / count, of_means.item(), of_sums.item(), alone


def means():
    head = ("rank", "samples", "no all-reduce", "mean of the means", "sums and counts")
    return "validation loss of 20 samples on two ranks", (*head, "one process"), on_ranks(losses)


if __name__ == "__main__":
    main(gradients, memory, modes, means)
