"""Probes of exercise 3.1: which samples the ranks see, in which order, and uneven shares."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from jobkit.exercise.ranks import gather, on_ranks
from jobkit.exercise.table import Table

_SAMPLES, _WORLD = 16, 2
_DOWNLOAD_S = 0.4
Loader = DataLoader[Any]


def _loader(sampled: bool, rank: int) -> Loader:
    data = TensorDataset(torch.arange(_SAMPLES))
    sampler: DistributedSampler[Any] | None = None
    if sampled:
        sampler = DistributedSampler(data, _WORLD, rank, seed=3)
    made = torch.Generator().manual_seed(3)  # both ranks have the seed of the job
    return DataLoader(data, 4, sampler=sampler, shuffle=not sampled, generator=made)


def _indices(loader: Loader) -> list[int]:
    return [int(index) for (batch,) in loader for index in batch]


def _share(rank: int, sampled: bool) -> list[int]:
    return _indices(_loader(sampled, rank))


def shares() -> list[Table]:
    """One epoch on two ranks without and with a sampler, by index."""
    rows: list[tuple[object, ...]] = []
    for name, sampled in (("none", False), ("DistributedSampler", True)):
        first, second = on_ranks(_share, sampled)
        for rank, seen in enumerate((first, second)):
            others = (second, first)[rank]
            both = len(set(seen) & set(others))
            rows.append((name, rank, len(seen), both, " ".join(map(str, seen))))
    return [
        Table(
            f"one epoch of {_SAMPLES} samples on two ranks",
            ("sampler", "rank", "samples", "also seen by the other", "indices"),
            rows,
        )
    ]


def orders() -> list[Table]:
    """Three epochs of rank 0 without and with set_epoch."""
    rows = []
    for name, called in (("not called", False), ("called", True)):
        loader = _loader(True, 0)
        before: list[list[int]] = []
        for epoch in range(3):
            if called:
                assert isinstance(loader.sampler, DistributedSampler)
                loader.sampler.set_epoch(epoch)
            seen = _indices(loader)
            rows.append((name, epoch, seen in before, " ".join(map(str, seen))))
            before.append(seen)
    return [
        Table(
            "the order of rank 0 in three epochs",
            ("set_epoch", "epoch", "seen before", "indices"),
            rows,
        )
    ]


def _look(rank: int, waits: bool) -> tuple[object, ...]:
    """Rank 0 writes a file slowly; what each rank finds when it begins to read."""
    path = Path(os.environ["JOBKIT_EXERCISE_FOLDER"]) / "data"
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        for _ in range(4):
            with path.open("ab") as out:
                out.write(bytes(250_000))
            time.sleep(_DOWNLOAD_S / 4)
    if waits:
        dist.barrier()
    after = time.monotonic() - begun
    size = path.stat().st_size if path.exists() else 0
    gather(None)
    return ("barrier" if waits else "none", rank, round(after, 3), size, path.stat().st_size)


def files() -> list[Table]:
    """A download by rank 0, with and without a barrier after it."""
    rows = [row for waits in (False, True) for row in on_ranks(_look, waits)]
    return [
        Table(
            "rank 0 writes a file of 1,000,000 bytes",
            ("wait", "rank", "reads after (s)", "bytes found", "bytes in the end"),
            rows,
        )
    ]


def _count(rank: int, right: list[bool], drop: bool) -> tuple[int, int]:
    """Right answers and samples of a rank's share."""
    data = TensorDataset(torch.tensor(right))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, _WORLD, rank, shuffle=False, drop_last=drop
    )
    shares = [bool(data[i][0]) for i in sampler]
    return sum(shares), len(shares)


def uneven() -> list[Table]:
    """The accuracy over 5 samples on two ranks: dropped, padded, and each sample once."""
    right = [True, False, True, True, False]
    rows: list[tuple[object, ...]] = []
    for name, drop in (("drop the last", True), ("repeat the first", False)):
        counts = on_ranks(_count, right, drop)
        rows.append(_accuracy(name, counts))
    once = [(sum(right[rank::_WORLD]), len(right[rank::_WORLD])) for rank in range(_WORLD)]
    rows.append(_accuracy("each sample once", once))
    return [
        Table(
            f"{len(right)} validation samples, {sum(right)} of them right, on two ranks",
            ("what is left over", "samples of the ranks", "counted", "right", "accuracy (%)"),
            rows,
        )
    ]


def _accuracy(name: str, counts: list[tuple[int, int]]) -> tuple[object, ...]:
    right, samples = (sum(column) for column in zip(*counts, strict=True))
    shares = " + ".join(str(count) for _, count in counts)
    return (name, shares, samples, right, 100 * right / samples)
