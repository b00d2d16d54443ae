"""Exercise 1.1: the shapes of the batches that a rank gets."""

import torch

from jobkit.payload.model import CNN
from ranks import main

SAMPLES, GLOBAL_BATCH = 1000, 64


def batches():
    model, rows = CNN(10), []
    for world in (1, 2, 4):
        samples = torch.arange(SAMPLES)[0::world]  # those of rank 0
        sizes = [len(part) for part in samples.split(GLOBAL_BATCH // world)]
        whole, free = 0, 0
        for size in sizes:
            x = torch.zeros(size, 3, 32, 32)
            whole += x.shape == (GLOBAL_BATCH, 3, 32, 32)
            free += x.shape[1:] == (3, 32, 32) and model(x[:2]).shape[1:] == (10,)
        rows.append((world, len(sizes), sizes[0], sizes[-1], whole, free))
    head = ("ranks", "batches", "first", "last", f"shape == ({GLOBAL_BATCH}, 3, 32, 32)")
    title = f"{SAMPLES} samples, global batch {GLOBAL_BATCH}: batches of rank 0 that pass"
    return title, (*head, "shape[1:] == (3, 32, 32)"), rows


if __name__ == "__main__":
    main(batches)
