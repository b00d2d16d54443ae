"""Check of exercise 6.1: a training against a reference, and a validation on uneven shares."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checking import MissingError, by_rank, load, main
from ranks import gather

TOLERANCE = 1e-4  # of sums in another order, relative


class Watched(nn.Module):
    """A classifier that notes in which state its forward pass is called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.drop = nn.Dropout(0.5)
        self.states = []  # training mode, gradients recorded

    def forward(self, x):
        """(N, 6) to (N, 3); the dropout is on a copy, so that a training can be compared."""
        self.drop(x)
        self.states.append((self.training, torch.is_grad_enabled()))
        return self.layers(x)


def batches(seed, sizes):
    """Batches of these sizes."""
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=made), torch.randint(3, (n,), generator=made))
            for n in sizes]  # fmt: skip


def norm_of(model):
    """The norm of all gradients."""
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def train(mine, rank):
    """Three steps, and the same in one process on the batches of both ranks."""
    torch.manual_seed(0)
    model = Watched()
    right, expected = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(right.parameters(), lr=0.5)
    for parts in zip(*(batches(10 + r, [8, 8, 8]) for r in range(2)), strict=True):
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(right(x), y) for x, y in parts]).mean().backward()
        expected.append(norm_of(right))
        optimizer.step()
    wrapped, norms = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: norms.append(norm_of(model)))
    wrapped.eval()
    mine.train_epoch(wrapped, batches(10 + rank, [8, 8, 8]), optimizer, torch.device("cpu"))
    pairs = zip(model.parameters(), right.parameters(), strict=True)
    return {
        "off": max(float((a - b).abs().max()) for a, b in pairs),
        "norms": norms,
        "expected": expected,
        "trains": all(training for training, _ in model.states),
    }


def evaluate(mine, rank):
    """A validation of 16 samples on rank 0 and 4 on rank 1."""
    torch.manual_seed(1)
    model, shares = Watched(), [batches(20, [8, 8]), batches(21, [4])]
    x, y = (torch.cat(part) for part in zip(*shares[0], *shares[1], strict=True))
    with torch.no_grad():
        logits = model.layers(x)
    expected = (F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item())
    model.train()
    returned = mine.evaluate(model, shares[rank], torch.device("cpu"))
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise MissingError("evaluate() did not return two values")
    return {
        "returned": [float(value) for value in returned],
        "expected": expected,
        "trains": any(training for training, _ in model.states) or not model.states,
        "recorded": any(recorded for _, recorded in model.states),
        "after": model.training,
    }


def work(rank, path):
    """Train, then validate."""
    mine = load(path, "train_epoch", "evaluate")
    trained = train(mine, rank)
    gather(None)
    return trained, evaluate(mine, rank)


def near(values, expected):
    """Whether all values are the expected one up to rounding."""
    return all(abs(value - expected) <= TOLERANCE * max(1.0, abs(expected)) for value in values)


def judge(results):
    """Say of each promise whether it is kept."""
    trained, validated = zip(*results, strict=True)
    steps = [len(result["norms"]) for result in trained]
    losses, accuracies = zip(*(result["returned"] for result in validated), strict=True)
    loss, accuracy = validated[0]["expected"]
    norms = [", ".join(f"{n:.3g}" for n in trained[0][key]) for key in ("norms", "expected")]
    shares = "over the 20 samples of both ranks (16 and 4)"
    training = [
        (
            all(result["off"] <= TOLERANCE for result in trained),
            "three steps give the weights of a training in one process",
            f"after three steps the weights are up to {trained[0]['off']:.2g} away from those of a "
            f"right training; the norms of its gradients were {norms[0]}, right are {norms[1]}",
        ),
        (
            all(result["trains"] for result in trained),
            "the model is in training mode while it is trained",
            "the model was in evaluation mode in a training step (it came so to train_epoch())",
        ),
    ]
    if steps != [3, 3]:
        training = [(False, "", f"three batches made {by_rank(steps)} optimizer steps")]
    return [
        *training,
        (
            not any(result["trains"] for result in validated),
            "the model is in evaluation mode while it is validated",
            "the model was in training mode in the validation: dropout was active",
        ),
        (
            not any(result["recorded"] for result in validated),
            "the validation records nothing for a backward pass",
            "the validation recorded its operations for a backward pass that never comes: that "
            "takes memory",
        ),
        (
            len(set(losses)) == len(set(accuracies)) == 1,
            "both ranks return the same values",
            f"the ranks return different values: loss {by_rank([f'{x:.4f}' for x in losses])}",
        ),
        (
            near(losses, loss),
            "the loss is that of all samples",
            f"the loss is {by_rank([f'{x:.4f}' for x in losses])}; the mean {shares} is {loss:.4f}",
        ),
        (
            near(accuracies, accuracy),
            "the accuracy is that of all samples",
            f"the accuracy is {by_rank([f'{x:.3f}' for x in accuracies])}; {shares} it is "
            f"{accuracy:.3f}",
        ),
        (
            all(result["after"] for result in validated),
            "after the validation the model is in training mode again",
            "after evaluate() the model is still in evaluation mode: the next epoch would train so",
        ),
    ]


if __name__ == "__main__":
    main(work, judge)
