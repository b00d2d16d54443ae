"""The images of a run: read from their source once, kept in one file that all ranks map.

    DATA_DIR/cache/KEY-v2.pt      images, labels and class names, as torch.save writes them

The file is written under another name, while a lock is held, and renamed: half a file is never
visible. Reading it executes no code (weights_only), and the ranks of a node share its pages.
"""

import gzip
import hashlib
import os
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from jobkit.errors import UsageError
from jobkit.files import locked
from jobkit.spec.dataset import IDX, check_source, find_idx, folder_path

IMAGE = (32, 32, 3)  # height, width, channels
Say = Callable[[str], None]
Read = Callable[[Say], "Dataset"]
_VERSION = 2  # of the file's form
_NO_ANSWER_S = 30  # a compute node's network often swallows packets instead of refusing them
# By name: Pillow would start Ghostscript, a whole interpreter, for what begins as PostScript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


@dataclass(frozen=True)
class Images:
    """One part of a data set: images (N, 32, 32, 3) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> "Images":
        """Copies of the samples with these indices."""
        return Images(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Dataset:
    """Training and test images, and the names of the classes."""

    train: Images
    test: Images
    classes: list[str]


# --- sources -----------------------------------------------------------------------------------


def read_cifar10(folder: Path, download: bool = True) -> Dataset:
    """CIFAR-10 from its folder or archive, downloaded where both are absent.

    torchvision compares the checksum of each file before it is unpickled.
    """
    from torchvision.datasets import CIFAR10  # a slow import (1.3 s) that only this source needs

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NO_ANSWER_S)
    try:
        train, test = (CIFAR10(folder, train=train, download=download) for train in (True, False))
    except (OSError, RuntimeError, EOFError, tarfile.TarError, zlib.error) as error:
        why = f"cannot be downloaded ({error})" if download else "is not downloaded in a dry run"
        raise UsageError(
            f"cifar10 is not in {folder}, or corrupt there, and {why}: on a machine with network "
            f"access run 'python -m jobkit prepare --dataset cifar10 --data-dir {folder}', "
            "or use --dataset synthetic"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
    parts = [Images(torch.from_numpy(p.data), torch.tensor(p.targets)) for p in (train, test)]
    return Dataset(parts[0], parts[1], list(train.classes))


def read_idx(folder: Path) -> Dataset:
    """MNIST and its like: grey images with a border of 2, in three equal channels."""
    files = find_idx(folder)

    def part(name: str) -> Images:
        path = files[f"{name}_images"]
        images, labels = _read_idx_file(path, 3), _read_idx_file(files[f"{name}_labels"], 1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise UsageError(
                f"{path}: {len(images):,} images of {images.shape[1]} x {images.shape[2]} pixels, "
                f"and {len(labels):,} labels beside; needs 28 x 28, and a label for each"
            )
        planes = F.pad(images, (2, 2, 2, 2))[..., None].expand(-1, -1, -1, 3)
        return Images(planes, labels.long())

    train, test = part("train"), part("test")
    classes = 1 + max(int(train.labels.max()), int(test.labels.max()))
    return Dataset(train, test, [str(i) for i in range(classes)])


def _read_idx_file(path: Path, dimensions: int) -> Tensor:
    """The numbers of an IDX file: two zeros, type 8 (bytes), dimensions, the shape, the content."""
    try:
        blob = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        head, *shape = struct.unpack_from(f">I{dimensions}I", blob)
        if head != 0x800 + dimensions:
            raise ValueError(f"it is not bytes in {dimensions} dimensions")
        content = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return content[4 + 4 * dimensions :].reshape(shape)
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error) as error:
        raise UsageError(f"{path}: not a whole IDX file ({error})") from None


def read_folder(root: Path, say: Say) -> Dataset:
    """train/<class>/* and test/<class>/* as 32 x 32 RGB; other sizes are scaled."""
    from torchvision.datasets import ImageFolder

    try:
        train, test = (ImageFolder(root / part) for part in ("train", "test"))
    except OSError as error:
        raise UsageError(f"{root}: {error}") from None
    say(f"reading {len(train.samples) + len(test.samples):,} images")

    def part(source: ImageFolder) -> Images:
        images = pool.map(_decode, [path for path, _ in source.samples])
        return Images(torch.stack(list(images)), torch.tensor(source.targets))

    with ThreadPoolExecutor() as pool:
        return Dataset(part(train), part(test), train.classes)


def _decode(path: str) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(path, formats=_FORMATS)
        pixels = image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR).tobytes()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise UsageError(f"{path}: not a readable image") from None
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(IMAGE)


def synthetic(train: int, test: int, classes: int = 10) -> Dataset:
    """Images that a small CNN can learn: a smooth pattern per class under strong noise.

    The same numbers for the same sizes at any seed of the run.
    """
    generator = torch.Generator().manual_seed(20)
    coarse = torch.rand(classes, 3, 4, 4, generator=generator)
    patterns = F.interpolate(coarse, (32, 32), mode="bicubic")

    def part(count: int) -> Images:
        labels = torch.arange(count) % classes
        images = torch.empty(count, *IMAGE, dtype=torch.uint8)
        for start in range(0, count, 4096):  # in pieces: the noise is 12 times the images' size
            chosen = patterns[labels[start : start + 4096]]
            noise = torch.randn(chosen.shape, generator=generator) * 0.35
            mixed = (chosen * 0.6 + 0.2 + noise).clamp(0, 1) * 255
            images[start : start + 4096] = mixed.to(torch.uint8).permute(0, 2, 3, 1)
        return Images(images, labels)

    return Dataset(part(train), part(test), [f"class{i}" for i in range(classes)])


def find_source(
    dataset: str, data_dir: Path, train: int | None, test: int | None, download: bool = True
) -> tuple[Path, Read]:
    """The prepared file of a dataset, whether it exists or not, and how to read its source.

    The file's name changes with the source's content. train and test are the sizes of generated
    data. download: whether CIFAR-10 may be downloaded if it is absent. Raises UsageError for a path
    that cannot be used.
    """

    def file(key: str) -> Path:
        return data_dir / "cache" / f"{key}-v{_VERSION}.pt"

    if dataset == "synthetic":
        sizes = (train or 50_000, test or 10_000)
        return file(f"synthetic-{sizes[0]}-{sizes[1]}"), lambda say: synthetic(*sizes)
    if dataset == "cifar10":
        return file("cifar10"), lambda say: read_cifar10(data_dir, download)
    check_source(dataset)
    root = folder_path(dataset)
    assert root is not None
    paths = sorted(root.rglob("*"))
    content = repr([(str(p), s.st_size, s.st_mtime_ns) for p in paths if (s := p.stat())])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    if dataset.startswith(IDX):
        return file(f"idx-{digest}"), lambda say: read_idx(root)
    return file(f"folder-{digest}"), lambda say: read_folder(root, say)


# --- the prepared file -------------------------------------------------------------------------


def prepare(path: Path, read: Read, say: Say) -> Path:
    """The prepared file, made where it is absent or damaged.

    Raises UsageError if the source cannot be read or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), wait=True):
            if path.exists():
                try:
                    open_prepared(path)
                    return path
                except UsageError as error:
                    say(f"{error}; preparing it again")
            say(f"preparing {path}")
            data = read(say)
            beside = path.with_suffix(".tmp")
            parts = (data.train, data.test)
            content = {
                "images": [part.images.contiguous() for part in parts],
                "labels": [part.labels for part in parts],
                "classes": data.classes,
            }
            try:
                with beside.open("wb") as file:
                    torch.save(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or (str(error).splitlines() or ["?"])[0]
        raise UsageError(
            f"{path} cannot be written: {why}; free some space, or choose another directory with "
            "--data-dir"
        ) from None
    return path


def open_prepared(path: Path) -> Dataset:
    """Map a prepared file into memory. Raises UsageError for one that cannot be used."""
    try:
        content = torch.load(path, mmap=True, weights_only=True)
        train, test = map(Images, content["images"], content["labels"])
        data = Dataset(train, test, list(content["classes"]))
        for part in (train, test):
            if part.images.shape != (len(part.labels), *IMAGE):
                raise ValueError("images of another shape")
            # Far from here such a label would end a GPU's context.
            if not 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(data.classes):
                raise ValueError("a label that is no class")
    except Exception as error:  # a damaged file fails in many ways
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} is damaged ({first[:200]}): remove it") from None
    return data
