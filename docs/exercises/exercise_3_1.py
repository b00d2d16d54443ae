"""Exercise 3.1: which samples the ranks see, in which order, and uneven shares."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ranks import gather, main, on_ranks

SAMPLES, WORLD = 16, 2


def see(rank, sampled, epoch=None):
    """The samples of a rank in an epoch, in their order; both ranks have the seed of the job."""
    data = range(SAMPLES)
    sampler = DistributedSampler(data, WORLD, rank, seed=3) if sampled else None
    if epoch is not None:
        sampler.set_epoch(epoch)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, 4, sampler=sampler, shuffle=not sampled, generator=generator)
    return torch.cat(list(loader)).tolist()


def shares():
    rows = []
    for name, sampled in (("none", False), ("DistributedSampler", True)):
        seen = on_ranks(see, sampled)
        both = len(set(seen[0]) & set(seen[1]))
        rows += [(name, r, len(s), both, " ".join(map(str, s))) for r, s in enumerate(seen)]
    head = ("sampler", "rank", "samples", "also seen by the other", "indices")
    return f"one epoch of {SAMPLES} samples on two ranks", head, rows


def orders():
    rows = []
    for name in ("not called", "called"):
        before = []
        for epoch in range(3):
            order = see(0, True, epoch if name == "called" else None)
            rows.append((name, epoch, order in before, " ".join(map(str, order))))
            before.append(order)
    head = ("set_epoch", "epoch", "seen before", "indices")
    return "the order of rank 0 in three epochs", head, rows


def read(rank, waits):
    """Rank 0 writes a file slowly; what each rank finds when it begins to read."""
    path = Path(os.environ["EXERCISE_FOLDER"]) / "data"
    dist.barrier()
    for _ in range(4) if rank == 0 else ():
        with path.open("ab") as out:
            out.write(bytes(250_000))
        time.sleep(0.1)
    if waits:
        dist.barrier()
    size = path.stat().st_size if path.exists() else 0
    gather(None)
    return ("barrier" if waits else "none", rank, size, path.stat().st_size)


def files():
    rows = [row for waits in (False, True) for row in on_ranks(read, waits)]
    head = ("wait", "rank", "bytes found", "bytes in the end")
    return "rank 0 writes a file of 1,000,000 bytes", head, rows


def uneven():
    """The accuracy over 5 samples on two ranks: dropped, padded, and each sample once."""
    right, rows = [True, False, True, True, False], []
    for name, drop in (("drop the last", True), ("repeat the first", False), ("each once", None)):
        shares = [range(rank, len(right), WORLD) for rank in range(WORLD)]
        if drop is not None:
            more = {"shuffle": False, "drop_last": drop}
            shares = [list(DistributedSampler(right, WORLD, r, **more)) for r in range(WORLD)]
        counted, correct = sum(map(len, shares)), sum(right[i] for share in shares for i in share)
        sizes = " + ".join(str(len(share)) for share in shares)
        rows.append((name, sizes, counted, correct, 100 * correct / counted))
    head = ("what is left over", "samples of the ranks", "counted", "right", "accuracy (%)")
    title = f"{len(right)} validation samples, {sum(right)} of them right, on two ranks"
    return title, head, rows


if __name__ == "__main__":
    main(shares, orders, files, uneven)
