"""Batches: which samples each rank gets in each iteration, and how they are augmented.

For iteration i of an epoch the global batch is permutation(seed, epoch)[i*B:(i+1)*B]; each rank
takes its part of that slice, and a sample's augmentation depends on (seed, epoch, sample) alone.
So any number of ranks sees exactly the global batches of one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from jobkit.data.images import Dataset, Images
from jobkit.spec.runspec import RunSpec

PADDING = 4
AHEAD_BATCHES, AHEAD_SAMPLES = 16, 8192  # that a GPU crops at once, at most
IMAGE_BYTES = 32 * 32 * 3 + 8  # with its label
# Of a sample that is cropped: whole and in the crop of two groups of steps; as it is and flipped,
# both within their borders of 4; and the places of its rows.
CROP_BYTES = 2 * IMAGE_BYTES + 2 * 32 * 32 * 3 + 2 * 40 * 40 * 3 + 2 * 32 * 8
# Per-channel mean and standard deviation of CIFAR-10's training images, on a scale of 0 to 255.
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def share(count: int, part: int, parts: int) -> slice:
    """The slice of count items for one of the parts; sizes differ by one at most."""
    return slice(count * part // parts, count * (part + 1) // parts)


@dataclass
class Progress:
    """The position of a training, for any number of ranks and any batch size."""

    epoch: int = 0  # the one in progress, from 0
    position: int = 0  # its training samples that have been used, over all ranks
    iteration: int = 0  # optimizer steps in all


Crops = tuple[Tensor, Tensor]  # images (N, 3, 32, 32) uint8, and labels (N,)


@dataclass(frozen=True)
class Step:
    """One optimizer step: this rank's samples, by microbatch, and the size of the global batch."""

    micro_batches: list[Tensor]
    global_count: int
    crops: Sequence[Crops | None] = ()  # by microbatch; None: to be made


class Batches:
    """The order of the training samples, for one rank."""

    def __init__(
        self, samples: int, batch_size: int, rank: int, world_size: int, accumulate: int, seed: int
    ) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate

    def __len__(self) -> int:
        """Optimizer steps in an epoch; the last one may be smaller, and is used."""
        return -(-self.samples // self.batch_size)

    def epoch(
        self, epoch: int, position: int = 0, device: torch.device | None = None
    ) -> Iterator[Step]:
        """Yield the steps of an epoch. A rank's microbatch may be empty, never missing.

        position: samples of the epoch, over all ranks, that have been used already. device: where
        the indices are to be. They are copied there once: a copy in each step would have the host
        wait until the GPU has done all that was issued before.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.samples, generator=generator)
        if device is not None:
            order = order.to(device)
        for start in range(position, self.samples, self.batch_size):
            batch = order[start : start + self.batch_size]
            mine = batch[share(len(batch), self.rank, self.world_size)]
            parts = [mine[share(len(mine), j, self.accumulate)] for j in range(self.accumulate)]
            yield Step(parts, len(batch), [None] * len(parts))


# The odd words of SplitMix64 (Steele et al., 2014), as signed numbers of 64 bits.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIXERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def sample_hash(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """63 random bits per sample from (seed, epoch, index)."""
    x = indices * _STEP + (seed * 0x2545F491 + epoch) % 2**63
    # A shift of a negative number repeats its sign: the masks make the shifts logical ones.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIXERS[0]
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIXERS[1]
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**63 - 1)


def alternating_flips(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """0 or 1 for each sample: whether it is flipped in an epoch of the speed run.

    Half of the samples, drawn by the seed, are flipped in every even epoch, and the others in every
    odd one: two epochs show each image both ways (arXiv 2404.00498).
    """
    return (sample_hash(seed, -1, indices) + epoch % 2) % 2


def augment(
    images: Tensor, bits: Tensor, flip: Tensor, padding: int = PADDING, reflect: bool = False
) -> Tensor:
    """Random crop, from each sample's bits, within a border; flipped where flip is 1.

    images: (N, 32, 32, 3) uint8; returns (N, 3, 32, 32) uint8, channels last in memory.
    """
    count, height, width, channels = images.shape
    if count == 0:  # no runs to take
        return images.permute(0, 3, 1, 2)
    span, tall, wide = 2 * padding + 1, height + 2 * padding, width + 2 * padding
    top, left = bits % span, (bits // span) % span
    # All images and, after them, all images flipped, each within a border of zeros.
    if reflect:
        rows, columns = _reflected(images, height, padding), _reflected(images, width, padding)
        both = torch.cat([images, images.flip(2)])[:, rows][:, :, columns]
    else:
        both = images.new_zeros(2 * count, tall, wide, channels)
        inner = both[:, padding : padding + height, padding : padding + width]
        inner[:count] = images
        inner[count:] = images.flip(2)
    # A crop is `height` runs of bytes. A view with a run at every byte makes each of them a row,
    # and taking rows is a plain copy: seven times as fast as indexing windows.
    runs = both.view(-1).unfold(0, width * channels, 1)
    image = torch.arange(count, device=bits.device) + count * flip
    first = (image * tall + top) * wide + left
    starts = first[:, None] + wide * torch.arange(height, device=bits.device)
    crops = runs.index_select(0, starts.view(-1) * channels)
    return crops.view(count, height, width, channels).permute(0, 3, 1, 2)


def _reflected(images: Tensor, size: int, padding: int) -> Tensor:
    """Indices of rows or columns with a border in which the image is mirrored."""
    at = torch.arange(-padding, size + padding, device=images.device).abs()
    return size - 1 - (size - 1 - at).abs()


def _whole_image(channels: Tensor) -> Tensor:
    """Repeat (3,) over an image (3, 32, 32): one long row to multiply, not a thousand of 3."""
    return channels.repeat(32, 32, 1).permute(2, 0, 1)


def data_bytes(images: int, size: int) -> int:
    """Bytes on a GPU at most: the data set's images, and the crops made of several steps' samples.

    size: samples of the rank in a step.
    """
    samples = max(size, min(AHEAD_BATCHES * size, AHEAD_SAMPLES))  # or fewer, in whole steps
    return images * IMAGE_BYTES + samples * CROP_BYTES


class DeviceData:
    """The images resident on the device, and the batches made there; dtype: of the batches."""

    def __init__(
        self, data: Dataset, device: torch.device, spec: RunSpec, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device, self.dtype, self.crops_ahead = device, dtype, device.type != "cpu"
        self._spec, self._seed = spec, spec.seed + spec.repeat
        self.classes = len(data.classes)
        self._format = torch.channels_last if spec.channels_last else torch.contiguous_format
        self.train = Images(data.train.images.to(device), data.train.labels.to(device))
        self.test = Images(data.test.images.to(device), data.test.labels.to(device))
        mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
        self._scale, self._shift = _whole_image(1 / std), _whole_image(-mean / std)

    def training_batch(
        self, indices: Tensor, epoch: int, crops: Crops | None = None
    ) -> tuple[Tensor, Tensor]:
        """Images (N, 3, 32, 32), normalised, in the memory format, and labels (N,).

        crops: of these samples in this epoch, where they have been made already.
        """
        planes, labels = crops or self._crop(indices, epoch)
        return self._normalise(planes), labels

    def _crop(self, indices: Tensor, epoch: int) -> Crops:
        indices = indices.to(self.device)
        images = self.train.images.index_select(0, indices)
        labels = self.train.labels.index_select(0, indices)
        if not self._spec.augment:
            return images.permute(0, 3, 1, 2), labels
        bits = sample_hash(self._seed, epoch, indices)
        if self._spec.speed_run:
            flips = alternating_flips(self._seed, epoch, indices)
            return augment(images, bits, flips, padding=2, reflect=True), labels
        return augment(images, bits, bits // (2 * PADDING + 1) ** 2 % 2), labels

    def cropped_ahead(self, steps: Iterable[Step], epoch: int) -> Iterator[Step]:
        """Yield the steps; on a GPU with the crops of several, which are made together.

        A batch takes some 40 operations on its own, and a small model's step few more: the host
        could not issue them as fast as a GPU does them. A CPU is better off with one batch, which
        stays in its caches.
        """
        steps = iter(steps)
        if not self.crops_ahead:
            yield from steps
        for first in steps:
            size = max(1, sum(map(len, first.micro_batches)))
            ahead = max(1, min(AHEAD_BATCHES, AHEAD_SAMPLES // size))
            group = [first, *islice(steps, ahead - 1)]
            parts = [part for step in group for part in step.micro_batches]
            planes, labels = self._crop(torch.cat(parts), epoch)
            sizes = [len(part) for part in parts]
            crops = zip(planes.split(sizes), labels.split(sizes), strict=True)
            for step in group:
                yield replace(step, crops=list(islice(crops, len(step.micro_batches))))

    def test_batch(self, part: slice) -> tuple[Tensor, Tensor]:
        """The test samples of a slice, as training_batch gives them, without augmentation."""
        planes = self.test.images[part].permute(0, 3, 1, 2)
        return self._normalise(planes), self.test.labels[part]

    def _normalise(self, planes: Tensor) -> Tensor:
        images = planes.to(torch.float32)
        torch.addcmul(self._shift, images, self._scale, out=images)  # in place: the batch is large
        return images.contiguous(memory_format=self._format).to(self.dtype)
