"""The images of a run: all ranks map the prepared file, and take the part that the run asks for."""

from dataclasses import replace

import torch

from jobkit.data.images import Dataset, Images, Say, find_source, open_prepared, prepare
from jobkit.errors import UsageError
from jobkit.paths import data_root, expanded
from jobkit.payload.distributed import Group, all_or_raise, gather
from jobkit.spec.runspec import RunSpec

_SPLIT_SEED = 20  # the same part trains at any seed of the run


def load_data(spec: RunSpec, group: Group, say: Say, dry_run: bool) -> Dataset:
    """The data set of a run. Rank 0 prepares its file, and every rank maps it.

    A dry run writes nothing: each rank reads what exists. Raises UsageError on every rank.
    """
    data_dir = expanded(spec.data_dir) if spec.data_dir else data_root()
    source = (spec.dataset, data_dir, spec.train_samples, spec.test_samples)
    if dry_run:
        file, read = find_source(*source, download=False)
        data = open_prepared(file) if file.exists() else read(say)
    else:
        others = group.place.rank > 0  # which wait for rank 0
        made = lambda: None if others else prepare(*find_source(*source), say)  # noqa: E731
        path = gather(all_or_raise(made, UsageError))[0]
        data = all_or_raise(lambda: open_prepared(path), UsageError)
    train = limited(data.train, spec.train_samples, "train")
    data = split(replace(data, train=train), spec.train_split)
    return replace(data, test=limited(data.test, spec.test_samples, "test"))


def limited(part: Images, count: int | None, name: str) -> Images:
    """So many samples of a part, evenly spread, as sources are sorted by class."""
    available = len(part.labels)
    if count is None or count == available:
        return part
    if count > available:
        raise UsageError(f"--{name}-samples {count}: there are only {available}")
    return part.take(torch.arange(count) * available // count)


def split(data: Dataset, share: float | None) -> Dataset:
    """The data with only a share of its training samples; the others replace the test samples.

    Copies them, once in each rank. Raises UsageError where nothing is left of one part.
    """
    if share is None:
        return data
    count = len(data.train.labels)
    trained = round(share * count)
    if not 0 < trained < count:
        raise UsageError(f"--train-split {share:g}: leaves one part of {count} samples empty")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, test = order[:trained].sort()[0], order[trained:].sort()[0]
    return Dataset(data.train.take(train), data.train.take(test), data.classes)
