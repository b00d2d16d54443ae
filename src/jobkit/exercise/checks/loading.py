"""Check of exercise 3.1: who downloads, which samples each rank sees, and in which order."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from jobkit.exercise.checks.judge import Remark, check, each_rank, load, remark

_SAMPLES, _BATCH, _WORLD = 24, 3, 2
_PATIENCE_S = 10.0  # how long a download lasts at most
# Calls in which a rank may wait for the other.
_WAITING = ("barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list")

_MARKS = ("waits", "went-on", "downloads")


class _Indices(Dataset[int]):
    """A dataset whose samples are their own indices."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class _Download:
    """A download that lasts until the other rank has gone on, waits, or downloads too."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self.calls = 0

    def __call__(self) -> None:
        """Write the file, late."""
        self.calls += 1
        self.mark("downloads")
        end = time.monotonic() + _PATIENCE_S
        marks = [self._folder / f"{what}-{1 - self._rank}" for what in _MARKS]
        while time.monotonic() < end and not any(mark.exists() for mark in marks):
            time.sleep(0.01)
        (self._folder / "data").touch()

    def mark(self, what: str) -> None:
        """Say to the other rank how far this one is."""
        (self._folder / f"{what}-{self._rank}").touch()


def _seen(start_epoch: Callable[..., object], loader: Any, epoch: int) -> list[list[int]]:
    """The samples of an epoch, by batches."""
    start_epoch(loader, epoch)
    return [torch.as_tensor(batch).flatten().tolist() for batch in loader]


def work(rank: int, path: str) -> dict[str, Any]:
    """Download, then two epochs."""
    folder = Path(os.environ["JOBKIT_EXERCISE_FOLDER"])
    download, barrier = _Download(rank, folder), dist.barrier
    dist.barrier()

    def marked(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            download.mark("waits")
            return real(*args, **settings)

        return call

    waits: dict[str, Any] = {name: marked(getattr(dist, name)) for name in _WAITING}
    with mock.patch.multiple(dist, **waits):
        mine = load(path, "get_data", "get_loader", "start_epoch")
        mine.get_data(download, rank)
    there = (folder / "data").exists()
    download.mark("went-on")
    barrier()
    torch.manual_seed(1 + rank)  # an order must not depend on it
    loader = mine.get_loader(_Indices(), _BATCH, rank, _WORLD)
    epochs = [_seen(mine.start_epoch, loader, epoch) for epoch in range(2)]
    return {"calls": download.calls, "there": there, "epochs": epochs}


def _flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def judge(found: Sequence[dict[str, Any]]) -> list[Remark]:
    """Say of each promise whether it is kept."""
    calls = [each["calls"] for each in found]
    orders = [[_flat(epoch) for epoch in each["epochs"]] for each in found]
    first = [set(order[0]) for order in orders]
    both, missing = sorted(first[0] & first[1]), _SAMPLES - len(first[0] | first[1])
    sizes = sorted({len(batch) for each in found for epoch in each["epochs"] for batch in epoch})
    late = [str(rank) for rank, each in enumerate(found) if not each["there"]]
    return [
        remark(
            sum(calls) == 1,
            "one rank downloads",
            f"download() was called {sum(calls)} times in all: {each_rank(calls)}",
        ),
        remark(
            not late,
            "every rank finds the files after get_data()",
            f"get_data() returned on rank {' and '.join(late)} while the files were incomplete",
        ),
        remark(
            not both,
            "no sample is seen by both ranks",
            f"both ranks saw {len(both)} of {_SAMPLES} samples in one epoch: "
            f"{', '.join(map(str, both[:6]))}{', ...' if len(both) > 6 else ''}",
        ),
        remark(
            not missing,
            "every sample is seen in an epoch",
            f"{missing} of {_SAMPLES} samples were seen by no rank in one epoch",
        ),
        remark(
            sizes == [_BATCH],
            f"each rank has batches of {_BATCH}",
            f"get_loader() was asked for batches of {_BATCH}, and made batches of "
            f"{', '.join(map(str, sizes))}",
        ),
        remark(
            all(order[0] != sorted(order[0]) for order in orders),
            "the order is random",
            "the samples came in the order of their indices",
        ),
        remark(
            all(order[0] != order[1] for order in orders),
            "each epoch has an order of its own",
            f"epochs 0 and 1 had the same order; rank 0 began with {orders[0][0][:5]} both times",
        ),
    ]


def run(path: str) -> list[Remark]:
    """Check a file."""
    return check(path, work, judge)
