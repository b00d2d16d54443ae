"""Probes of exercise 6.1: gradients that add up, memory of a validation, modes, and means."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.exercise.ranks import on_ranks
from jobkit.exercise.table import Table
from jobkit.payload.host import peak_memory_mib, reset_peak_memory
from jobkit.payload.model import CNN
from jobkit.units import MIB

_STEPS, _IMAGES = 6, 256


def _norms(clears: bool) -> list[tuple[float, float]]:
    """The norm of the gradient and the loss at each of some steps."""
    torch.manual_seed(0)
    model, found = nn.Linear(8, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    for _ in range(_STEPS):
        if clears:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        parts = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found.append((float(torch.stack(parts).norm()), loss.item()))
        optimizer.step()
    return found


def gradients() -> list[Table]:
    """The same steps with and without zero_grad."""
    pairs = zip(_norms(True), _norms(False), strict=True)
    return [
        Table(
            "steps on the same batch: norm of the gradient, and loss",
            ("step", "norm with zero_grad", "norm without", "loss with zero_grad",
             "loss without"),
            [(i, a[0], b[0], a[1], b[1]) for i, (a, b) in enumerate(pairs)],
        )
    ]  # fmt: skip


def _validate(rank: int, records: bool) -> tuple[float, float]:
    """MiB kept for a backward pass, and the growth of the process's peak in MiB."""
    model, kept = CNN(10).eval(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    images = torch.randn(_IMAGES, 3, 32, 32)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.no_grad():
        model(images[:2])  # the first pass makes what stays
    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_mib(cpu).resident
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.set_grad_enabled(records), hooks:
        loss = F.cross_entropy(model(images), torch.zeros(_IMAGES, dtype=torch.long))
    grown = peak_memory_mib(cpu).resident - before
    return sum(kept.values()) / MIB, grown + 0 * loss.item()


def memory() -> list[Table]:
    """A validation pass with and without no_grad."""
    rows = [
        ("no" if records else "yes", *on_ranks(_validate, records, world=1)[0])
        for records in (False, True)
    ]
    return [
        Table(
            f"a validation pass of the CNN over {_IMAGES} images in one batch",
            ("no_grad", "kept for backward (MiB)", "peak of the process grows by (MiB)"),
            rows,
        )
    ]


def modes() -> list[Table]:
    """Dropout and batch normalisation in both modes, on the same batch twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    x, rows = torch.randn(64, 16), []
    for name in ("train", "eval"):
        model.train(name == "train")
        before = norm.running_mean.clone()
        with torch.no_grad():
            first, second = model(x), model(x)
        rows.append(
            (
                name,
                100 * float((first == 0).double().mean()),
                float((first - second).abs().max()),
                float((norm.running_mean - before).abs().max()),
            )
        )
    return [
        Table(
            "one batch twice through batch normalisation, ReLU and dropout of 50 %",
            ("mode", "zeros in the output (%)", "two passes differ by",
             "running mean moves by"),
            rows,
        )
    ]  # fmt: skip


def _losses(rank: int) -> tuple[float, ...]:
    """A rank's own validation loss, the mean of the ranks' means, and the mean of all samples."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    x, y = torch.randn(20, 8), torch.randint(3, (20,))
    mine = slice(0, 16) if rank == 0 else slice(16, 20)
    with torch.no_grad():
        own = F.cross_entropy(model(x[mine]), y[mine], reduction="sum").double()
        alone = F.cross_entropy(model(x), y).item()
    count = torch.tensor(float(len(y[mine])), dtype=torch.float64)
    mean = own / count
    averaged, total = mean.clone(), torch.stack([own, count])
    dist.all_reduce(averaged)
    dist.all_reduce(total)
    world = dist.get_world_size()
    return count.item(), mean.item(), (averaged / world).item(), (total[0] / total[1]).item(), alone


def means() -> list[Table]:
    """The validation loss of ranks with 16 and 4 samples, three ways."""
    rows = [(rank, *values) for rank, values in enumerate(on_ranks(_losses))]
    return [
        Table(
            "validation loss over 20 samples on two ranks",
            ("rank", "samples", "no all-reduce", "mean of the means", "sums and counts",
             "one process"),
            rows,
        )
    ]  # fmt: skip
