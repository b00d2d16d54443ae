"""Check of exercise 3.1: who downloads, which samples each rank sees, and in which order."""

import os
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from checking import by_rank, load, main

SAMPLES, BATCH, WORLD = 24, 3, 2
PATIENCE_S = 10.0  # how long a download lasts at most
# Calls in which a rank may wait for the other.
WAITING = ("barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list")


def work(rank, path):
    folder, barrier, calls = Path(os.environ["EXERCISE_FOLDER"]), dist.barrier, []

    def mark(what):  # says to the other rank how far this one is
        (folder / f"{what}-{rank}").touch()

    def download():
        """Last until the other rank has gone on, waits, or downloads too."""
        calls.append(rank)
        mark("downloads")
        end = time.monotonic() + PATIENCE_S
        marks = [folder / f"{what}-{1 - rank}" for what in ("waits", "went-on", "downloads")]
        while time.monotonic() < end and not any(mark.exists() for mark in marks):
            time.sleep(0.01)
        (folder / "data").touch()

    def marked(real):
        def call(*args, **settings):
            mark("waits")
            return real(*args, **settings)

        return call

    barrier()
    with mock.patch.multiple(dist, **{name: marked(getattr(dist, name)) for name in WAITING}):
        mine = load(path, "get_data", "get_loader", "start_epoch")
        mine.get_data(download, rank)
    there = (folder / "data").exists()
    mark("went-on")
    barrier()
    torch.manual_seed(1 + rank)  # an order must not depend on it
    loader, epochs = mine.get_loader(range(SAMPLES), BATCH, rank, WORLD), []
    for epoch in range(2):
        mine.start_epoch(loader, epoch)
        epochs.append([torch.as_tensor(batch).flatten().tolist() for batch in loader])
    return {"calls": len(calls), "there": there, "epochs": epochs}


def judge(results):
    calls = [result["calls"] for result in results]
    orders = [[sum(epoch, []) for epoch in result["epochs"]] for result in results]
    seen = [set(order[0]) for order in orders]
    both, missing = seen[0] & seen[1], SAMPLES - len(seen[0] | seen[1])
    sizes = sorted({len(batch) for r in results for epoch in r["epochs"] for batch in epoch})
    return [
        (sum(calls) == 1, "one rank downloads", f"calls of download(): {by_rank(calls)}"),
        (all(result["there"] for result in results),
         "every rank finds the complete files after get_data()",
         f"complete: {by_rank([result['there'] for result in results])}"),
        (not both, "no sample is seen by both ranks",
         f"{len(both)} of {SAMPLES} samples are, in one epoch"),
        (not missing, "every sample is seen in an epoch", f"{missing} of {SAMPLES} are not"),
        (sizes == [BATCH], f"each rank has batches of {BATCH}", f"they have {sizes}"),
        (all(order[0] != sorted(order[0]) for order in orders), "the order is random",
         "the samples came in the order of their indices"),
        (all(order[0] != order[1] for order in orders), "each epoch has an order of its own",
         f"rank 0 began with {orders[0][0][:5]} in epochs 0 and 1"),
    ]  # fmt: skip


if __name__ == "__main__":
    main(work, judge)
