"""Check of exercise 6.1: three steps against a reference, and a validation on uneven shares."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.exercise.checks.judge import MissingError, Remark, check, each_rank, load, remark
from jobkit.exercise.ranks import gather

_NEAR = 1e-4  # of sums in another order, relative
Batches = list[tuple[Tensor, Tensor]]
_CPU = torch.device("cpu")


class _Watched(nn.Module):
    """A classifier that notes in which state its forward pass is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.drop = nn.Dropout(0.5)
        self.seen: list[tuple[bool, bool]] = []  # training mode, gradients recorded

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to (N, 3); the dropout is on a copy, so that a training can be compared."""
        self.drop(x)
        self.seen.append((self.training, torch.is_grad_enabled()))
        return self.layers(x)


def _batches(seed: int, sizes: Sequence[int]) -> Batches:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 6, generator=made), torch.randint(3, (n,), generator=made)) for n in sizes
    ]


def _reference(model: nn.Module, steps: Sequence[Batches]) -> list[float]:
    """Train on the batches of all ranks in one process; return the norms of the gradients."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
    for parts in zip(*steps, strict=True):
        optimizer.zero_grad()
        loss = torch.stack([F.cross_entropy(model(x), y) for x, y in parts]).mean()
        loss.backward()
        norms.append(_norm(model))
        optimizer.step()
    return norms


def _norm(model: nn.Module) -> float:
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(gradients).norm()) if gradients else 0.0


def _train(mine: Any, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _Watched()
    right = copy.deepcopy(model)
    expected = _reference(right, [_batches(10 + r, [8, 8, 8]) for r in range(2)])
    wrapped = DistributedDataParallel(model)
    optimizer, norms = torch.optim.SGD(wrapped.parameters(), lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: norms.append(_norm(model)))
    wrapped.eval()
    mine.train_epoch(wrapped, _batches(10 + rank, [8, 8, 8]), optimizer, _CPU)
    pairs = zip(model.parameters(), right.parameters(), strict=True)
    return {
        "off": max(float((a - b).abs().max()) for a, b in pairs),
        "norms": norms,
        "expected": expected,
        "modes": sorted({mode for mode, _ in model.seen}),
    }


def _evaluate(mine: Any, rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model, shares = _Watched(), [_batches(20, [8, 8]), _batches(21, [4])]
    every = [pair for share in shares for pair in share]
    x, y = torch.cat([x for x, _ in every]), torch.cat([y for _, y in every])
    with torch.no_grad():
        logits = model.layers(x)
    expected = (
        float(F.cross_entropy(logits, y)),
        float((logits.argmax(1) == y).double().mean()),
    )
    model.train()
    returned = mine.evaluate(model, shares[rank], _CPU)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise MissingError("evaluate() did not return two values")
    return {
        "returned": [float(value) for value in returned],
        "expected": expected,
        "modes": sorted({mode for mode, _ in model.seen}),
        "recorded": any(grad for _, grad in model.seen),
        "samples": len(model.seen),
        "after": model.training,
    }


def work(rank: int, path: str) -> dict[str, Any]:
    """Train, then validate."""
    mine = load(path, "train_epoch", "evaluate")
    trained = _train(mine, rank)
    gather(None)
    return {"train": trained, "evaluate": _evaluate(mine, rank)}


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _NEAR * max(1.0, abs(b))


def _of_training(found: Sequence[dict[str, Any]]) -> list[Remark]:
    steps = [len(each["norms"]) for each in found]
    if steps != [3, 3]:
        return [Remark(False, f"three batches made {each_rank(steps)} optimizer steps")]
    one = found[0]
    return [
        remark(
            all(each["off"] <= _NEAR for each in found),
            "three steps give the weights of a training in one process",
            f"after three steps the weights are up to {one['off']:.2g} away from those of a right "
            f"training; the norms of its gradients were {_numbers(one['norms'])}, right are "
            f"{_numbers(one['expected'])}",
        ),
        remark(
            all(each["modes"] == [True] for each in found),
            "the model is in training mode while it is trained",
            "the model was in evaluation mode in a training step (it came so to train_epoch())",
        ),
    ]


def _of_evaluation(found: Sequence[dict[str, Any]]) -> list[Remark]:
    losses, accuracies = zip(*(each["returned"] for each in found), strict=True)
    loss, accuracy = found[0]["expected"]
    return [
        remark(
            all(each["modes"] == [False] for each in found),
            "the model is in evaluation mode while it is validated",
            "the model was in training mode in the validation: dropout was active",
        ),
        remark(
            not any(each["recorded"] for each in found),
            "the validation records nothing for a backward pass",
            "the validation recorded its operations for a backward pass that never comes: "
            "that takes memory",
        ),
        remark(
            len(set(losses)) == 1 and len(set(accuracies)) == 1,
            "both ranks return the same values",
            f"the ranks return different values: loss {each_rank([f'{x:.4f}' for x in losses])}",
        ),
        remark(
            all(_near(x, loss) for x in losses),
            "the loss is that of all samples",
            f"the loss is {each_rank([f'{x:.4f}' for x in losses])}; the mean over the 20 samples "
            f"of both ranks (16 and 4) is {loss:.4f}",
        ),
        remark(
            all(_near(x, accuracy) for x in accuracies),
            "the accuracy is that of all samples",
            f"the accuracy is {each_rank([f'{x:.3f}' for x in accuracies])}; over the 20 samples "
            f"of both ranks (16 and 4) it is {accuracy:.3f}",
        ),
        remark(
            all(each["after"] for each in found),
            "after the validation the model is in training mode again",
            "after evaluate() the model is still in evaluation mode: the next epoch would train so",
        ),
    ]


def judge(found: Sequence[dict[str, Any]]) -> list[Remark]:
    """Say of each promise whether it is kept."""
    trained = _of_training([each["train"] for each in found])
    return trained + _of_evaluation([each["evaluate"] for each in found])


def run(path: str) -> list[Remark]:
    """Check a file."""
    return check(path, work, judge)
