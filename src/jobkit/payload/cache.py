"""The prepared cache: uint8 files that all ranks of a node map into memory and share.

One process builds it beside its place, under a lock, and renames it: a half-built cache is never
seen. Its manifest has the checksum of every file; a broken cache is built anew.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobkit.errors import UsageError
from jobkit.payload.sources import IMAGE, Images, Say, Source

CACHE_VERSION = 1
_PARTS = ("train", "test")


@dataclass(frozen=True)
class Dataset:
    """Train and test images in memory, and the names of the classes."""

    train: Images
    test: Images
    classes: list[str]


def ensure_cache(source: Source, data_dir: Path, say: Say) -> Path:
    """Return the folder of a whole, checked cache of the source, building it where needed.

    Raises UsageError where the source cannot be read or the cache cannot be written.
    """
    folder = data_dir / "cache" / f"{source.key}-v{CACHE_VERSION}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            if folder.exists() and (fault := find_fault(folder)):
                say(f"the cache {folder} is broken ({fault}): building it anew")
                shutil.rmtree(folder)
            if not folder.exists():
                say(f"preparing {source.description} in {folder}")
                _build(source, folder, say)
    except OSError as error:
        raise UsageError(
            f"{folder}: the cache cannot be written: {error.strerror or error}; "
            "free some space, or choose another place with --data-dir"
        ) from None
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file. Without it (some file systems have none) the rename still holds."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield


def _build(source: Source, folder: Path, say: Say) -> None:
    """Write the cache beside its place and rename it; leave nothing behind on any failure."""
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


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def find_fault(folder: Path) -> str:
    """Check a cache against its manifest; return what is wrong with it, or an empty string."""
    try:
        sums = _manifest(folder)["sha256"]
        for name, expected in sums.items():
            digest = hashlib.sha256()
            with (folder / name).open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            if digest.hexdigest() != expected:
                return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return str(error)
    return ""


def open_cache(folder: Path, train: int | None = None, test: int | None = None) -> Dataset:
    """Map a cache into memory, or the first train and test samples of it.

    Raises UsageError where there are fewer than asked for.
    """
    manifest = _manifest(folder)
    parts = {}
    for part, wanted in zip(_PARTS, (train, test), strict=True):
        count = manifest["counts"][part]
        if wanted and wanted > count:
            raise UsageError(f"--{part}-samples {wanted}: there are only {count}")
        images = _map(folder / f"{part}_images", torch.uint8, count * 32 * 32 * 3)
        labels = _map(folder / f"{part}_labels", torch.int64, count)
        kept = _spread(count, wanted or count)
        parts[part] = Images(images.reshape(count, *IMAGE), labels)
        if len(kept) < count:
            parts[part] = Images(parts[part].images[kept], labels[kept])
    return Dataset(parts["train"], parts["test"], manifest["classes"])


def _spread(count: int, wanted: int) -> torch.Tensor:
    """So many of count indices, evenly spread: sources lie class by class."""
    return torch.arange(wanted) * count // wanted


def _map(path: Path, dtype: torch.dtype, size: int) -> torch.Tensor:
    """A private mapping: nothing writes to the file, and the ranks of a node share its pages."""
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)
