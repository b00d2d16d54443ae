"""The prepared cache: uint8 files that all ranks of a node map into memory and share.

One process builds it under a temporary name and a lock, and renames it: a partial cache is never
visible. Its manifest has the checksum of every file; a corrupt cache is rebuilt.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from jobkit.errors import UsageError
from jobkit.files import locked, open_regular, read_regular
from jobkit.payload.data.images import IMAGE, Images, Say
from jobkit.payload.data.sources import Source

CACHE_VERSION = 1
_PARTS = ("train", "test")
_FILES = tuple(f"{part}_{what}" for part in _PARTS for what in ("images", "labels"))
_MOST_SAMPLES, _MOST_CLASSES = 1 << 32, 100_000
# What reading a cache raises where it is none.
_INVALID = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Dataset:
    """Train and test images in memory, and the names of the classes."""

    train: Images
    test: Images
    classes: list[str]


def cache_folder(source: Source, data_dir: Path) -> Path:
    """The folder of the source's cache, whether it exists or not."""
    return data_dir / "cache" / f"{source.key}-v{CACHE_VERSION}"


def read_directly(
    source: Source, data_dir: Path, train: int | None, test: int | None, say: Say
) -> Dataset:
    """The source's images without writing a cache: from an existing one, else from the source."""
    folder = cache_folder(source, data_dir)
    if folder.exists() and not find_fault(folder):
        return open_cache(folder, train, test)
    *parts, classes = source.read(say)
    kept = [
        _first(part, data, wanted)
        for part, data, wanted in zip(_PARTS, parts, (train, test), strict=True)
    ]
    return Dataset(kept[0], kept[1], classes)


def ensure_cache(source: Source, data_dir: Path, say: Say) -> Path:
    """The folder of a complete, checked cache of the source, built if needed.

    Raises UsageError if the source cannot be read or the cache cannot be written.
    """
    folder = cache_folder(source, data_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock"), wait=True):
            for partial in folder.parent.glob(f".{folder.name}.*"):
                shutil.rmtree(partial, ignore_errors=True)  # its builder was killed
            if folder.exists() and (fault := find_fault(folder)):
                say(f"the cache {folder} is corrupt ({fault}): rebuilding it")
                shutil.rmtree(folder)
            if not folder.exists():
                say(f"preparing {source.description} in {folder}")
                _build(source, folder, say)
    except OSError as error:
        raise UsageError(
            f"{folder}: the cache cannot be written: {error.strerror or error}; "
            "free some space, or choose another directory with --data-dir"
        ) from None
    return folder


def _build(source: Source, folder: Path, say: Say) -> None:
    """Write the cache to a temporary folder and rename it; leave nothing behind on failure."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        train, test, classes = source.read(say)
        counts, sums = {}, {}
        for part, data in zip(_PARTS, (train, test), strict=True):
            counts[part] = len(data.labels)
            for name, tensor in ((f"{part}_images", data.images), (f"{part}_labels", data.labels)):
                sums[name] = _write(beside / name, tensor)
        manifest = {"v": CACHE_VERSION, "classes": classes, "counts": counts, "sha256": sums}
        (beside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        beside.chmod(0o755)  # mkdtemp's folder is for its owner alone; others may share a cache
        try:
            beside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # otherwise another process, on a file system without locks, was first
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(path: Path, tensor: torch.Tensor) -> str:
    """Write a tensor's bytes; return their SHA-256."""
    blob = tensor.contiguous().numpy().tobytes()
    with path.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(blob).hexdigest()


def _manifest(folder: Path) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """The number of samples of each part, the classes, and the checksum of each file.

    Raises ValueError, and others of what is no manifest: anybody may have written it.
    """
    content = json.loads(read_regular(folder / "manifest.json"))
    counts, classes, sums = content["counts"], content["classes"], content["sha256"]
    if content["v"] != CACHE_VERSION or set(counts) != set(_PARTS) or set(sums) != set(_FILES):
        raise ValueError("its manifest lacks required fields")
    if not all(type(count) is int and 0 < count < _MOST_SAMPLES for count in counts.values()):
        raise ValueError("its manifest has impossible numbers of samples")
    named = type(classes) is list and all(type(name) is str for name in classes)
    if not named or not 0 < len(classes) <= _MOST_CLASSES:
        raise ValueError("its manifest has no list of classes")
    return counts, classes, sums


def find_fault(folder: Path) -> str:
    """Check a cache against its manifest; return what is wrong, or an empty string."""
    try:
        counts, classes, sums = _manifest(folder)
        for name, expected in sums.items():
            digest = hashlib.sha256()
            with open_regular(folder / name) as file:
                if os.fstat(file.fileno()).st_size != _size(name, counts):
                    return f"{name} has another size"
                while block := file.read(1 << 22):
                    digest.update(block)
                    if name.endswith("_labels"):
                        _check_labels(
                            torch.frombuffer(bytearray(block), dtype=torch.int64), classes
                        )
            if digest.hexdigest() != expected:
                return f"{name} has another checksum"
    except _INVALID as error:
        return str(error) or type(error).__name__
    return ""


def _size(name: str, counts: dict[str, int]) -> int:
    """The bytes of a file of a cache."""
    part, _, what = name.partition("_")
    return counts[part] * (math.prod(IMAGE) if what == "images" else torch.int64.itemsize)


def _check_labels(labels: torch.Tensor, classes: list[str]) -> None:
    """Raise ValueError for a label that is no class: far from here it would end a GPU's context."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise ValueError("it has a label that is no class")


def open_cache(folder: Path, train: int | None = None, test: int | None = None) -> Dataset:
    """Map a cache into memory, or the first train and test samples of it.

    Raises UsageError for one that cannot be used, and if there are fewer samples than requested.
    """
    parts = {}
    try:
        counts, classes, _ = _manifest(folder)
        for part, wanted in zip(_PARTS, (train, test), strict=True):
            count = counts[part]
            images = _map(folder / f"{part}_images", torch.uint8, count * math.prod(IMAGE))
            labels = _map(folder / f"{part}_labels", torch.int64, count)
            parts[part] = _first(part, Images(images.reshape(count, *IMAGE), labels), wanted)
    except UsageError:
        raise
    except _INVALID as error:
        raise UsageError(f"the cache {folder} cannot be used: {error}: remove it") from None
    return Dataset(parts["train"], parts["test"], classes)


def _first(part: str, data: Images, wanted: int | None) -> Images:
    """The wanted number of samples, evenly spread, as sources are sorted by class."""
    count = len(data.labels)
    if wanted is None or wanted == count:
        return data
    if wanted > count:
        raise UsageError(f"--{part}-samples {wanted}: there are only {count}")
    kept = torch.arange(wanted) * count // wanted
    return Images(data.images[kept], data.labels[kept])


def _map(path: Path, dtype: torch.dtype, size: int) -> torch.Tensor:
    """A private mapping: nothing writes to the file, and the ranks of a node share its pages."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size * dtype.itemsize:
            raise ValueError(f"{path.name} has another size")
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)
