"""Load the data of a run on every rank: prepared once, checked once per node, mapped by all."""

from pathlib import Path

import torch

from jobkit.errors import UsageError
from jobkit.paths import data_root, expanded
from jobkit.payload.data.cache import Dataset, ensure_cache, find_fault, open_cache, read_directly
from jobkit.payload.data.images import Images, Say
from jobkit.payload.data.sources import find_source
from jobkit.payload.distributed import Group, all_or_raise
from jobkit.spec.runspec import RunSpec

_SPLIT_SEED = 20  # the same part trains at any seed of the run


def load_data(spec: RunSpec, group: Group, say: Say, dry_run: bool) -> Dataset:
    """The data set of a run. Rank 0 prepares its cache, one rank of each other node checks it.

    A dry run writes no cache: each rank reads what exists. Raises UsageError on every rank.
    """
    data_dir = expanded(spec.data_dir) if spec.data_dir else data_root()
    sizes = (spec.train_samples, spec.test_samples)
    place = group.place
    if dry_run:
        source = find_source(spec.dataset, data_dir, *sizes, download=False)
        return split(read_directly(source, data_dir, *sizes, say), spec.train_split)

    def prepare() -> Path | None:
        if place.rank:
            return None  # waits for rank 0
        return ensure_cache(find_source(spec.dataset, data_dir, *sizes), data_dir, say)

    folder = all_or_raise(group.gather, prepare, UsageError)[0]
    assert folder

    def check() -> None:
        if place.local_rank == 0 and place.rank != 0 and (fault := find_fault(folder)):
            raise UsageError(f"{folder} on rank {place.rank}: {fault}")

    all_or_raise(group.gather, check, UsageError)
    return split(open_cache(folder, *sizes), spec.train_split)


def split(data: Dataset, share: float | None) -> Dataset:
    """The data with only a share of its training samples; the others replace the test samples.

    Copies them, once in each rank. Raises UsageError where nothing is left of one part.
    """
    if share is None:
        return data
    count = len(data.train.labels)
    kept = round(share * count)
    if not 0 < kept < count:
        raise UsageError(f"--train-split {share:g}: leaves one part of {count} samples empty")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, test = (
        Images(data.train.images[part], data.train.labels[part])
        for part in (order[:kept].sort()[0], order[kept:].sort()[0])
    )
    return Dataset(train, test, data.classes)
