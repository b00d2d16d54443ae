"""Reading images from their source: CIFAR-10, folders, IDX files, or generated."""

import hashlib
import io
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobkit.errors import UsageError
from jobkit.files import read_regular
from jobkit.payload.data import cifar10, idx_images
from jobkit.payload.data.images import IMAGE, Images, Say
from jobkit.spec.dataset import IDX, check_classes, check_source, folder_path


@dataclass(frozen=True)
class Source:
    """A data source: a key for its cache that changes with its content, and how to read it."""

    key: str
    description: str
    read: Callable[[Say], tuple[Images, Images, list[str]]]


def find_source(
    dataset: str, data_dir: Path, train: int | None, test: int | None, download: bool = True
) -> Source:
    """The source of a dataset's name. train and test are the sizes of generated data.

    download: whether CIFAR-10 may be downloaded if it is absent.

    Raises UsageError for a path that cannot be used.
    """
    if dataset == "synthetic":
        sizes = (train or 50_000, test or 10_000)
        return Source(f"synthetic-{sizes[0]}-{sizes[1]}", dataset, lambda say: synthetic(*sizes))
    if dataset == "cifar10":
        return Source("cifar10", dataset, lambda say: cifar10.read(data_dir, say, download))
    check_source(dataset)
    path = folder_path(dataset)
    assert path is not None
    if dataset.startswith(IDX):
        return Source(
            f"idx-{idx_images.key(path)}", dataset, lambda say: idx_images.read(path, say)
        )
    entries = dict(_folder_entries(path))
    content = "\n".join(f"{name} {mark}" for name, (mark, _) in sorted(entries.items()))
    digest = hashlib.sha256(f"{path}\n{content}".encode()).hexdigest()[:16]
    return Source(f"folder-{digest}", dataset, lambda say: folder(path, sorted(entries), say))


# --- generated -------------------------------------------------------------------------------


def synthetic(train: int, test: int, classes: int = 10) -> tuple[Images, Images, list[str]]:
    """Images that a small CNN can learn: a smooth pattern per class under strong noise.

    The same numbers for the same sizes at any seed of the run.
    """
    generator = torch.Generator().manual_seed(20)
    coarse = torch.rand(classes, 3, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic")

    def part(count: int) -> Images:
        labels = torch.arange(count) % classes
        images = torch.empty(count, *IMAGE, dtype=torch.uint8)
        for start in range(0, count, 4096):  # in pieces: the noise is 12 times the images' size
            chosen = patterns[labels[start : start + 4096]]
            noise = torch.randn(chosen.shape, generator=generator) * 0.35
            mixed = (chosen * 0.6 + 0.2 + noise).clamp(0, 1) * 255
            images[start : start + 4096] = mixed.to(torch.uint8).permute(0, 2, 3, 1)
        return Images(images, labels)

    return part(train), part(test), [f"class{i}" for i in range(classes)]


# --- a folder of image files ----------------------------------------------------------

# By name: Pillow would start Ghostscript, a whole interpreter, for what begins as PostScript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MOST_PIXELS = 16_000_000  # of an image that becomes 32 x 32; decoded, that takes 64 MB
_MOST_BYTES = 64 << 20  # of an image's file

Entry = tuple[str, tuple[str, Any]]  # part/class/file, (what changes with its content, path)


def _folder_entries(root: Path) -> Iterator[Entry]:
    for part in ("train", "test"):
        for path in (root / part).glob("*/*"):
            if path.is_file() and not path.name.startswith("."):
                stat = path.stat()
                yield (
                    path.relative_to(root).as_posix(),
                    (f"{stat.st_size} {stat.st_mtime_ns}", path),
                )


def folder(path: Path, names: list[str], say: Say) -> tuple[Images, Images, list[str]]:
    """Read train/<class>/* and test/<class>/* as 32 x 32 RGB; other sizes are scaled.

    Raises UsageError that names an image which cannot be read, or classes that differ.
    """
    by_part = {p: [n for n in names if n.startswith(p + "/")] for p in ("train", "test")}
    classes = check_classes(path, *({n.split("/")[1] for n in by_part[p]} for p in by_part))
    index = {name: at for at, name in enumerate(names)}
    images = torch.empty(len(names), *IMAGE, dtype=torch.uint8)
    scaled = 0
    with ThreadPoolExecutor() as pool:
        blobs = _folder_blobs(path, names)
        for done, batch in enumerate(iter(lambda: list(itertools.islice(blobs, 1000)), [])):
            for name, (pixels, other_size) in pool.map(lambda b: _decode(path, *b), batch):
                images[index[name]] = pixels
                scaled += other_size
            if (done + 1) % 10 == 0:
                say(f"read {(done + 1) * 1000:,} of {len(names):,} images")
    if scaled:
        say(f"{scaled:,} images were not 32 x 32 and have been scaled")
    labels = torch.tensor([classes.index(n.split("/")[1]) for n in names])
    rows = {p: torch.tensor([index[n] for n in by_part[p]]) for p in by_part}
    train, test = (Images(images[rows[p]], labels[rows[p]]) for p in ("train", "test"))
    return train, test, classes


def _folder_blobs(root: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            yield name, read_regular(root / name, _MOST_BYTES)
        except OSError as error:
            raise UsageError(f"{root / name}: {error.strerror}") from None


def _decode(path: Path, name: str, blob: bytes) -> tuple[str, tuple[Tensor, bool]]:
    """Decode one image file; torchvision brings Pillow, which knows every common format."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(blob), formats=_FORMATS)
        if opened.width * opened.height > _MOST_PIXELS:
            raise ValueError
        image = opened.convert("RGB")
        other_size = image.size != (32, 32)
        if other_size:
            image = image.resize((32, 32), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(IMAGE)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise UsageError(f"{path}/{name}: not a readable image") from None
    return name, (pixels, other_size)
