"""Reading images from where they lie: CIFAR-10, folders or tars of image files, or generated."""

import hashlib
import io
import itertools
import pickle
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobkit.dataset import check_classes, check_source, check_tar, folder_path
from jobkit.errors import UsageError

IMAGE = (32, 32, 3)  # height, width, channels
CIFAR10_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Images:
    """One part of a data set: images (N, 32, 32, 3) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """A data source: a key for its cache that changes with its content, and how to read it."""

    key: str
    description: str
    read: Callable[[Say], tuple[Images, Images, list[str]]]


def find_source(dataset: str, data_dir: Path, train: int | None, test: int | None) -> Source:
    """The source of a dataset's name. train and test are the sizes of generated data.

    Raises UsageError for a path that cannot be used.
    """
    if dataset == "synthetic":
        sizes = (train or 50_000, test or 10_000)
        return Source(f"synthetic-{sizes[0]}-{sizes[1]}", dataset, lambda say: synthetic(*sizes))
    if dataset == "cifar10":
        return Source("cifar10", dataset, lambda say: cifar10(data_dir, say))
    check_source(dataset)
    path = folder_path(dataset)
    assert path is not None
    entries = dict(_tar_entries(path) if path.is_file() else _folder_entries(path))
    content = "\n".join(f"{name} {mark}" for name, (mark, _) in sorted(entries.items()))
    digest = hashlib.sha256(f"{path}\n{content}".encode()).hexdigest()[:16]
    return Source(f"folder-{digest}", dataset, lambda say: folder(path, sorted(entries), say))


# --- generated -------------------------------------------------------------------------------


def synthetic(train: int, test: int, classes: int = 10) -> tuple[Images, Images, list[str]]:
    """Images that a small CNN can learn: a smooth pattern a class, shifted, under strong noise.

    The same numbers for the same sizes, whatever the run's seed.
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


# --- CIFAR-10 --------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """Loads CIFAR-10's dictionaries of bytes, lists and numpy arrays, and nothing that runs."""

    _ALLOWED = frozenset(
        itertools.product(
            ("numpy.core.multiarray", "numpy._core.multiarray"), ("_reconstruct", "scalar")
        )
    ) | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10")
        return super().find_class(module, name)


def cifar10(data_dir: Path, say: Say) -> tuple[Images, Images, list[str]]:
    """Read CIFAR-10 from data_dir, downloading it through torchvision where it is absent.

    Takes cifar-10-python.tar.gz or the unpacked cifar-10-batches-py. Raises UsageError that says
    what to do where there is neither and no network.
    """
    unpacked, archive = data_dir / "cifar-10-batches-py", data_dir / "cifar-10-python.tar.gz"
    if not unpacked.is_dir() and not archive.is_file():
        _download(data_dir, say)
    try:
        batches = dict(_batches(unpacked, archive))
        train = [_part(batches[f"data_batch_{i}"]) for i in range(1, 6)]
        test = _part(batches["test_batch"])
    except (OSError, EOFError, tarfile.TarError, pickle.UnpicklingError, LookupError, TypeError,
            ValueError, AttributeError) as error:  # fmt: skip
        place = unpacked if unpacked.is_dir() else archive
        raise UsageError(f"{place} is broken ({error}): delete it and prepare it anew") from None
    images = torch.cat([p.images for p in train])
    return Images(images, torch.cat([p.labels for p in train])), test, list(CIFAR10_CLASSES)


def _download(data_dir: Path, say: Say) -> None:
    from torchvision.datasets import CIFAR10  # 1.3 s that other sources need not wait for
    from torchvision.datasets.utils import download_url

    say(f"downloading CIFAR-10 to {data_dir}")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        download_url(CIFAR10.url, str(data_dir), CIFAR10.filename, CIFAR10.tgz_md5)
    except (OSError, RuntimeError) as error:
        (data_dir / CIFAR10.filename).unlink(missing_ok=True)
        raise UsageError(
            f"cifar10 is not in {data_dir} and cannot be downloaded ({error}): on a machine with "
            f"network run 'python -m jobkit prepare --dataset cifar10 --data-dir {data_dir}', "
            "or take --dataset synthetic"
        ) from None


def _batches(unpacked: Path, archive: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    """Each of CIFAR-10's pickles by its file name; nothing is unpacked to disk."""
    if unpacked.is_dir():
        for path in [*unpacked.glob("data_batch_*"), unpacked / "test_batch"]:
            with path.open("rb") as file:
                yield path.name, _ArraysOnly(file, encoding="bytes").load()
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and (name.startswith("data_batch_") or name == "test_batch"):
                member_file = tar.extractfile(member)
                assert member_file is not None
                yield name, _ArraysOnly(io.BytesIO(member_file.read()), encoding="bytes").load()


def _part(batch: dict[bytes, Any]) -> Images:
    """Images of one pickle: rows of 3,072 bytes, the three colour planes one after the other."""
    planes = torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32)
    labels = torch.tensor(batch[b"labels"])
    if len(planes) != len(labels):
        raise ValueError(f"{len(planes)} images and {len(labels)} labels")
    return Images(planes.permute(0, 2, 3, 1).contiguous(), labels)


# --- a folder or tar of image files ----------------------------------------------------------

Entry = tuple[str, tuple[str, Any]]  # part/class/file, (what changes with its content, handle)


def _folder_entries(root: Path) -> Iterator[Entry]:
    for part in ("train", "test"):
        for path in (root / part).glob("*/*"):
            if path.is_file() and not path.name.startswith("."):
                stat = path.stat()
                yield (
                    path.relative_to(root).as_posix(),
                    (f"{stat.st_size} {stat.st_mtime_ns}", path),
                )


def _tar_entries(path: Path) -> Iterator[Entry]:
    """Image members, wherever train/ and test/ stand in the tar; links and devices are passed."""
    stat = path.stat()
    check_tar(path)
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                words = Path(member.name).parts[-3:]
                shown = len(words) == 3 and words[0] in ("train", "test")
                if member.isfile() and shown and not words[2].startswith("."):
                    mark = f"{member.size} {member.offset_data} {stat.st_size} {stat.st_mtime_ns}"
                    yield "/".join(words), (mark, member)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UsageError(f"{path}: the .tar is broken: {error}") from None


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
        blobs = _tar_blobs(path, index) if path.is_file() else _folder_blobs(path, names)
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
            yield name, (root / name).read_bytes()
        except OSError as error:
            raise UsageError(f"{root / name}: {error.strerror}") from None


def _tar_blobs(path: Path, index: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """The tar's images in the order in which they lie: one pass, nothing unpacked to disk."""
    for name, (_, member) in _tar_entries(path):
        if name in index:
            with path.open("rb") as file:
                file.seek(member.offset_data)
                yield name, file.read(member.size)


def _decode(path: Path, name: str, blob: bytes) -> tuple[str, tuple[Tensor, bool]]:
    """Decode one image file; torchvision brings Pillow, which knows every common format."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(blob)).convert("RGB")
        other_size = image.size != (32, 32)
        if other_size:
            image = image.resize((32, 32), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(IMAGE)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise UsageError(f"{path}/{name}: not a readable image") from None
    return name, (pixels, other_size)
