"""Probe of exercise 1.1: the shapes of the batches that a rank gets."""

import torch

from jobkit.exercise.table import Table
from jobkit.payload.model import CNN

_SAMPLES, _GLOBAL_BATCH = 1000, 64


def _batches(world: int) -> list[int]:
    """The batch sizes of rank 0 in an epoch, the last one with what is left."""
    share = _GLOBAL_BATCH // world
    samples = torch.arange(_SAMPLES)[0::world]
    return [len(part) for part in samples.split(share)]


def batches() -> list[Table]:
    """Pass each batch of an epoch through the CNN, with two assertions."""
    model, rows = CNN(10), []
    for world in (1, 2, 4):
        whole, free, sizes = 0, 0, _batches(world)
        for size in sizes:
            x = torch.zeros(size, 3, 32, 32)
            whole += x.shape == (_GLOBAL_BATCH, 3, 32, 32)
            free += x.shape[1:] == (3, 32, 32) and model(x[:2]).shape[1:] == (10,)
        rows.append((world, len(sizes), sizes[0], sizes[-1], whole, free))
    return [
        Table(
            f"{_SAMPLES} samples, global batch {_GLOBAL_BATCH}: batches of rank 0 that pass",
            ("ranks", "batches", "first", "last", f"shape == ({_GLOBAL_BATCH}, 3, 32, 32)",
             "shape[1:] == (3, 32, 32)"),
            rows,
        )
    ]  # fmt: skip
