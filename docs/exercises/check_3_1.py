"""Check of exercise 3.1: who downloads, which samples each rank sees, and in which order."""

import os
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from checking import by_rank, load, main

SAMPLES, BATCH, WORLD = 24, 3, 2
PATIENCE_S = 10.0  # how long a download lasts at most
# Calls in which a rank may wait for the other.
WAITING = ("barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list")
MARKS = ("waits", "went-on", "downloads")


class Indices(Dataset):
    """A dataset whose samples are their own indices."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class Download:
    """A download that lasts until the other rank has gone on, waits, or downloads too."""

    def __init__(self, rank, folder):
        self.rank, self.folder, self.calls = rank, folder, 0

    def __call__(self):
        self.calls += 1
        self.mark("downloads")
        end = time.monotonic() + PATIENCE_S
        marks = [self.folder / f"{what}-{1 - self.rank}" for what in MARKS]
        while time.monotonic() < end and not any(mark.exists() for mark in marks):
            time.sleep(0.01)
        (self.folder / "data").touch()

    def mark(self, what):
        """Say to the other rank how far this one is."""
        (self.folder / f"{what}-{self.rank}").touch()


def work(rank, path):
    """Download, then two epochs."""
    folder = Path(os.environ["EXERCISE_FOLDER"])
    download, barrier = Download(rank, folder), dist.barrier
    dist.barrier()

    def marked(real):
        def call(*args, **settings):
            download.mark("waits")
            return real(*args, **settings)

        return call

    with mock.patch.multiple(dist, **{name: marked(getattr(dist, name)) for name in WAITING}):
        mine = load(path, "get_data", "get_loader", "start_epoch")
        mine.get_data(download, rank)
    there = (folder / "data").exists()
    download.mark("went-on")
    barrier()
    torch.manual_seed(1 + rank)  # an order must not depend on it
    loader, epochs = mine.get_loader(Indices(), BATCH, rank, WORLD), []
    for epoch in range(2):
        mine.start_epoch(loader, epoch)
        epochs.append([torch.as_tensor(batch).flatten().tolist() for batch in loader])
    return {"calls": download.calls, "there": there, "epochs": epochs}


def judge(results):
    """Say of each promise whether it is kept."""
    calls = [result["calls"] for result in results]
    orders = [[sum(epoch, []) for epoch in result["epochs"]] for result in results]
    seen = [set(order[0]) for order in orders]
    both, missing = sorted(seen[0] & seen[1]), SAMPLES - len(seen[0] | seen[1])
    sizes = sorted({len(batch) for r in results for epoch in r["epochs"] for batch in epoch})
    late = [str(rank) for rank, result in enumerate(results) if not result["there"]]
    return [
        (
            sum(calls) == 1,
            "one rank downloads",
            f"download() was called {sum(calls)} times in all: {by_rank(calls)}",
        ),
        (
            not late,
            "every rank finds the files after get_data()",
            f"get_data() returned on rank {' and '.join(late)} while the files were incomplete",
        ),
        (
            not both,
            "no sample is seen by both ranks",
            f"both ranks saw {len(both)} of {SAMPLES} samples in one epoch: "
            f"{', '.join(map(str, both[:6]))}{', ...' if len(both) > 6 else ''}",
        ),
        (
            not missing,
            "every sample is seen in an epoch",
            f"{missing} of {SAMPLES} samples were seen by no rank in one epoch",
        ),
        (
            sizes == [BATCH],
            f"each rank has batches of {BATCH}",
            f"get_loader() was asked for batches of {BATCH}, and made batches of "
            f"{', '.join(map(str, sizes))}",
        ),
        (
            all(order[0] != sorted(order[0]) for order in orders),
            "the order is random",
            "the samples came in the order of their indices",
        ),
        (
            all(order[0] != order[1] for order in orders),
            "each epoch has an order of its own",
            f"epochs 0 and 1 had the same order; rank 0 began with {orders[0][0][:5]} both times",
        ),
    ]


if __name__ == "__main__":
    main(work, judge)
