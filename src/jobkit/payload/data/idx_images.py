"""MNIST and its like from IDX files, as the 32 x 32 RGB images of the other sources."""

import hashlib
from pathlib import Path

import torch

from jobkit.errors import UsageError
from jobkit.payload.data.images import IMAGE, Images, Say
from jobkit.spec import idx

_LARGEST = 256  # height and width of an image that becomes 32 x 32
_MOST_IMAGES = 2_000_000  # each becomes 3 kB; EMNIST has 814,255
_PIECE = 4096  # images that are scaled at one time


def key(folder: Path) -> str:
    """What changes with the files: their names, sizes and times."""
    stats = ((path, path.stat()) for path in idx.find(folder).values())
    text = "\n".join(f"{path.absolute()} {s.st_size} {s.st_mtime_ns}" for path, s in stats)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path, say: Say) -> tuple[Images, Images, list[str]]:
    """The training and test images, grey in three equal channels, and the classes by number.

    28 x 28 pixels get a border of 2 zeros; other sizes are scaled. Raises UsageError that names
    the file which cannot be used.
    """
    files = idx.find(folder)
    train, test = (_part(files[f"{p}_images"], files[f"{p}_labels"]) for p in ("train", "test"))
    say(f"read {len(train.labels):,} training and {len(test.labels):,} test images from {folder}")
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return train, test, [str(i) for i in range(classes)]


def _part(images_file: Path, labels_file: Path) -> Images:
    (count, height, width), pixels = idx.read(images_file, 3)
    (labels_count,), labels = idx.read(labels_file, 1)
    if count != labels_count:
        raise UsageError(f"{images_file}: {count:,} images, and {labels_count:,} labels beside")
    if max(height, width) > _LARGEST or count > _MOST_IMAGES:
        raise UsageError(
            f"{images_file}: {count:,} images of {height} x {width}, more than {_MOST_IMAGES:,} or "
            f"larger than {_LARGEST} x {_LARGEST}"
        )
    grey = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(count, 1, height, width)
    made = torch.empty(count, *IMAGE, dtype=torch.uint8)
    for start in range(0, count, _PIECE):
        piece = _to_32(grey[start : start + _PIECE])
        made[start : start + _PIECE] = piece.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    return Images(made, torch.frombuffer(bytearray(labels), dtype=torch.uint8).to(torch.int64))


def _to_32(grey: torch.Tensor) -> torch.Tensor:
    """Map (N, 1, H, W) uint8 to (N, 1, 32, 32) uint8."""
    if grey.shape[-2:] == (28, 28):
        return torch.nn.functional.pad(grey, (2, 2, 2, 2))
    scaled = torch.nn.functional.interpolate(
        grey.float(), IMAGE[:2], mode="bilinear", antialias=True
    )
    return scaled.round().clamp(0, 255).to(torch.uint8)
