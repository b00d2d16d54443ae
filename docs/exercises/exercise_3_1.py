"""Exercise 3.1: which samples the ranks see, in which order, and uneven shares."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ranks import gather, main, on_ranks

SAMPLES, WORLD = 16, 2


def loader_of(rank, sampled):
    """Both ranks have the seed of the job."""
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = DistributedSampler(data, WORLD, rank, seed=3) if sampled else None
    generator = torch.Generator().manual_seed(3)
    return DataLoader(data, 4, sampler=sampler, shuffle=not sampled, generator=generator)


def indices(loader):
    """The samples of an epoch in their order."""
    return [int(index) for (batch,) in loader for index in batch]


def see(rank, sampled):
    """What a rank sees in one epoch."""
    return indices(loader_of(rank, sampled))


def shares():
    """One epoch on two ranks without and with a sampler, by index."""
    rows = []
    for name, sampled in (("none", False), ("DistributedSampler", True)):
        seen = on_ranks(see, sampled)
        both = len(set(seen[0]) & set(seen[1]))
        rows += [(name, r, len(s), both, " ".join(map(str, s))) for r, s in enumerate(seen)]
    head = ("sampler", "rank", "samples", "also seen by the other", "indices")
    return f"one epoch of {SAMPLES} samples on two ranks", head, rows


def orders():
    """Three epochs of rank 0 without and with set_epoch."""
    rows = []
    for name in ("not called", "called"):
        loader, before = loader_of(0, True), []
        for epoch in range(3):
            if name == "called":
                loader.sampler.set_epoch(epoch)
            order = indices(loader)
            rows.append((name, epoch, order in before, " ".join(map(str, order))))
            before.append(order)
    head = ("set_epoch", "epoch", "seen before", "indices")
    return "the order of rank 0 in three epochs", head, rows


def read(rank, waits):
    """Rank 0 writes a file slowly; what each rank finds when it begins to read."""
    path = Path(os.environ["EXERCISE_FOLDER"]) / "data"
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        for _ in range(4):
            with path.open("ab") as out:
                out.write(bytes(250_000))
            time.sleep(0.1)
    if waits:
        dist.barrier()
    after = round(time.monotonic() - begun, 3)
    size = path.stat().st_size if path.exists() else 0
    gather(None)
    return ("barrier" if waits else "none", rank, after, size, path.stat().st_size)


def files():
    """A download by rank 0, with and without a barrier after it."""
    rows = [row for waits in (False, True) for row in on_ranks(read, waits)]
    head = ("wait", "rank", "reads after (s)", "bytes found", "bytes in the end")
    return "rank 0 writes a file of 1,000,000 bytes", head, rows


def uneven():
    """The accuracy over 5 samples on two ranks: dropped, padded, and each sample once."""
    right = [True, False, True, True, False]
    data, rows = TensorDataset(torch.tensor(right)), []
    for name, drop in (("drop the last", True), ("repeat the first", False), ("each once", None)):
        shares = []
        for rank in range(WORLD):
            sampler = range(rank, len(right), WORLD)
            if drop is not None:
                sampler = DistributedSampler(data, WORLD, rank, shuffle=False, drop_last=drop)
            shares.append([right[index] for index in sampler])
        samples, correct = sum(map(len, shares)), sum(map(sum, shares))
        sizes = " + ".join(str(len(share)) for share in shares)
        rows.append((name, sizes, samples, correct, 100 * correct / samples))
    head = ("what is left over", "samples of the ranks", "counted", "right", "accuracy (%)")
    title = f"{len(right)} validation samples, {sum(right)} of them right, on two ranks"
    return title, head, rows


if __name__ == "__main__":
    main(shares, orders, files, uneven)
