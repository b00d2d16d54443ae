"""Check of exercise 3.1: who downloads, which samples each rank sees, and in which order."""

import os
import time
from pathlib import Path

import torch

from checking import by_rank, load
from ranks import gather, join_group

SAMPLES, BATCH, WORLD = 24, 3, 2


def work(rank, path):
    data, calls = Path(os.environ["EXERCISE_FOLDER"]) / "data", []

    def download():
        """Last so long that a rank which does not wait is seen."""
        calls.append(rank)
        time.sleep(1.0)
        data.touch()

    join_group(rank, WORLD)
    mine = load(path, "get_data", "get_loader", "start_epoch")
    gather(None)
    mine.get_data(download, rank)
    there = data.exists()
    torch.manual_seed(1 + rank)  # an order must not depend on it
    loader, epochs = mine.get_loader(range(SAMPLES), BATCH, rank, WORLD), []
    for epoch in range(2):
        mine.start_epoch(loader, epoch)
        epochs.append([torch.as_tensor(batch).flatten().tolist() for batch in loader])
    calls, there, epochs = zip(*gather((len(calls), there, epochs)), strict=True)
    orders = [[sum(epoch, []) for epoch in both] for both in epochs]
    seen = [set(order[0]) for order in orders]
    both, missing = seen[0] & seen[1], SAMPLES - len(seen[0] | seen[1])
    sizes = sorted({len(batch) for part in epochs for epoch in part for batch in epoch})
    return [
        (sum(calls) == 1, "one rank downloads", f"calls of download(): {by_rank(calls)}"),
        (all(there), "every rank finds the complete files after get_data()",
         f"complete: {by_rank(there)}"),
        (not both, "no sample is seen by both ranks",
         f"{len(both)} of {SAMPLES} samples are, in one epoch"),
        (not missing, "every sample is seen in an epoch", f"{missing} of {SAMPLES} are not"),
        (sizes == [BATCH], f"each rank has batches of {BATCH}", f"they have {sizes}"),
        (all(order[0] != sorted(order[0]) for order in orders), "the order is random",
         "the samples came in the order of their indices"),
        (all(order[0] != order[1] for order in orders), "each epoch has an order of its own",
         f"rank 0 began with {orders[0][0][:5]} in epochs 0 and 1"),
    ]  # fmt: skip
