"""Exercise 6.1: gradients that add up, memory of a validation, modes, and means."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from jobkit.payload.model import CNN
from ranks import MIB, kept_for_backward, main, on_ranks

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
        parts = torch.stack([p.grad.norm() for p in model.parameters()])
        yield parts.norm().item(), loss.item()
        optimizer.step()


def gradients():
    pairs = enumerate(zip(norms(True), norms(False), strict=True))
    head = ("step", "norm with zero_grad", "norm without", "loss with zero_grad", "loss without")
    rows = [(i, a[0], b[0], a[1], b[1]) for i, (a, b) in pairs]
    return "steps on the same batch: norm of the gradient, and loss", head, rows


def memory():
    model, images = CNN(10).eval(), torch.randn(IMAGES, 3, 32, 32)
    rows = []
    for no_grad in (True, False):
        with torch.set_grad_enabled(not no_grad):
            kept = kept_for_backward(model, lambda: model(images))
        rows.append(("yes" if no_grad else "no", kept / MIB))
    title = f"a validation pass of the CNN over {IMAGES} images in one batch"
    return title, ("no_grad", "kept for backward (MiB)"), rows


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
        total = F.cross_entropy(model(x[mine]), y[mine], reduction="sum").double()
        alone = F.cross_entropy(model(x), y).item()
    count = torch.tensor(float(len(y[mine])), dtype=torch.float64)
    mean, sums = total / count, torch.stack([total, count])
    averaged = mean.clone()
    dist.all_reduce(averaged)
    dist.all_reduce(sums)
    of_means = averaged.item() / dist.get_world_size()
    return rank, count.item(), mean.item(), of_means, (sums[0] / sums[1]).item(), alone


def means():
    head = ("rank", "samples", "no all-reduce", "mean of the means", "sums and counts")
    title = "validation loss over 20 samples on two ranks"
    return title, (*head, "one process"), on_ranks(losses)


if __name__ == "__main__":
    main(gradients, memory, modes, means)
