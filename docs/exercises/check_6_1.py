"""Check of exercise 6.1: a training against a reference, and a validation on uneven shares."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checking import by_rank, load
from ranks import gather, join_group

TOLERANCE = 1e-4  # of sums in another order, relative


def make_model():
    """A classifier, and whether it was in training mode and recorded gradients in each pass."""
    torch.manual_seed(0)
    model, states = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), []
    model.register_forward_pre_hook(
        lambda module, _: states.append((module.training, torch.is_grad_enabled()))
    )
    return model, states


def batches(seed, sizes):
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=made), torch.randint(3, (n,), generator=made))
            for n in sizes]  # fmt: skip


def norm_of(model):
    return float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))


def train(mine, rank):
    """Three steps, and the same in one process on the batches of both ranks."""
    (model, states), (right, _), expected = make_model(), make_model(), []
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
    off = max(float((a - b).abs().max()) for a, b in pairs)
    return off, norms, expected, all(training for training, _ in states)


def evaluate(mine, rank):
    """A validation of 16 samples on rank 0 and 4 on rank 1."""
    (model, states), shares = make_model(), [batches(20, [8, 8]), batches(21, [4])]
    x, y = (torch.cat(part) for part in zip(*shares[0], *shares[1], strict=True))
    with torch.no_grad():
        logits = model(x)
    states.clear()
    expected = (F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item())
    returned = mine.evaluate(model, shares[rank], torch.device("cpu"))
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise LookupError("evaluate() did not return two values")
    returned = tuple(float(value) for value in returned)
    return returned, expected, states, model.training


def work(rank, path):
    join_group(rank, 2)
    mine = load(path, "train_epoch", "evaluate")
    off, norms, expected, in_mode = zip(*gather(train(mine, rank)), strict=True)
    returned, right, states, after = zip(*gather(evaluate(mine, rank)), strict=True)
    shown = [", ".join(f"{norm:.3g}" for norm in part[0]) for part in (norms, expected)]
    validation = [
        (all(abs(pair[i] - right[0][i]) <= TOLERANCE * max(1, right[0][i]) for pair in returned),
         f"the {name} is that of all 20 samples (16 and 4)",
         f"{by_rank([f'{pair[i]:.4f}' for pair in returned])}; right is {right[0][i]:.4f}")
        for i, name in enumerate(("loss", "accuracy"))
    ]  # fmt: skip
    return [
        (max(off) <= TOLERANCE, "three batches give the weights of a training in one process",
         f"they differ by up to {max(off):.2g}; the norms of the gradients were {shown[0]}, right "
         f"are {shown[1]}"),
        (all(in_mode), "the model is in training mode while it is trained",
         "it was in evaluation mode, as it came to train_epoch()"),
        (all(state and not any(mode for mode, _ in state) for state in states),
         "the model is in evaluation mode while it is validated", "it was in training mode"),
        (not any(recorded for state in states for _, recorded in state),
         "the validation records nothing for a backward pass", "it did, which takes memory"),
        (len(set(returned)) == 1, "both ranks return the same values",
         by_rank([f"{loss:.4f}" for loss, _ in returned])),
        *validation,
        (all(after), "after evaluate() the model is in training mode again",
         "it is in evaluation mode, and the next epoch would train so"),
    ]  # fmt: skip
