"""CIFAR-10: fetching it once, and reading it without unpacking it to disk."""

import contextlib
import hashlib
import os
import pickle
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from jobkit.errors import UsageError
from jobkit.files import open_regular, read_regular
from jobkit.payload.data.images import Images, Say

CLASSES = [
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
_NO_ANSWER_S = 30  # a compute node's network often swallows packets instead of refusing them


# As Keras publishes it; the page of CIFAR-10 itself has an MD5 only.
_ARCHIVE_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
_LARGEST_ARCHIVE = 1 << 30  # bytes, packed or not: the published one has 170 and 186 million
_LARGEST_BATCH = 64 << 20  # the published ones have 31 million each


def read(data_dir: Path, say: Say, download: bool = True) -> tuple[Images, Images, list[str]]:
    """Read CIFAR-10 from data_dir, downloading it if it is absent and download is true.

    Takes cifar-10-python.tar.gz or the unpacked cifar-10-batches-py. Raises UsageError with the
    fix if there is neither and it cannot be downloaded.
    """
    unpacked, archive = data_dir / "cifar-10-batches-py", data_dir / "cifar-10-python.tar.gz"
    if not unpacked.is_dir() and not archive.is_file():
        if not download:
            raise _absent(data_dir, "is not downloaded in a dry run")
        _download(data_dir, say)
    try:
        batches = dict(_batches(unpacked, archive))
        train = [_part(batches[f"data_batch_{i}"]) for i in range(1, 6)]
        test = _part(batches["test_batch"])
    except (OSError, EOFError, tarfile.TarError, pickle.UnpicklingError, KeyError,
            zlib.error) as error:  # fmt: skip
        place = unpacked if unpacked.is_dir() else archive
        raise UsageError(f"{place} is corrupt ({error}): delete it and prepare it again") from None
    images = torch.cat([p.images for p in train])
    return Images(images, torch.cat([p.labels for p in train])), test, list(CLASSES)


def _absent(data_dir: Path, why: str) -> UsageError:
    return UsageError(
        f"cifar10 is not in {data_dir} and {why}: on a machine with network access run "
        f"'python -m jobkit prepare --dataset cifar10 --data-dir {data_dir}', "
        "or use --dataset synthetic"
    )


def _download(data_dir: Path, say: Say) -> None:
    """Download the archive to a temporary name and rename it if its checksum matches."""
    from torchvision.datasets import CIFAR10  # a slow import (1.3 s) that only this source needs

    say(f"downloading CIFAR-10 from {CIFAR10.url} to {data_dir}")
    data_dir.mkdir(parents=True, exist_ok=True)
    archive = data_dir / CIFAR10.filename
    try:
        with (
            part_file(data_dir) as (beside, file),
            urllib.request.urlopen(CIFAR10.url, timeout=_NO_ANSWER_S) as answer,
        ):
            total = int(answer.headers.get("Content-Length") or 0)
            if _save(answer, total, file, say) != _ARCHIVE_SHA256:
                raise _absent(data_dir, f"came with a wrong checksum from {CIFAR10.url}")
            beside.chmod(0o644)
            beside.replace(archive)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise _absent(data_dir, f"cannot be downloaded ({error})") from None


@contextlib.contextmanager
def part_file(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file to write to, of a name that nobody can put a link at beforehand.

    Removed in the end, unless it was renamed.
    """
    handle, name = tempfile.mkstemp(prefix=".cifar-10-", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            yield Path(name), file
    finally:
        Path(name).unlink(missing_ok=True)


def _save(answer: Any, total: int, file: BinaryIO, say: Say) -> str:
    """Write an answer to a file, saying how far it is; return its SHA-256."""
    digest, done, said = hashlib.sha256(), 0, 0
    while block := answer.read(1 << 20):
        file.write(block)
        digest.update(block)
        done += len(block)
        if done > _LARGEST_ARCHIVE:
            raise ValueError("it is far too large")
        if total and done * 10 // total > said:
            said = done * 10 // total
            say(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _batches(unpacked: Path, archive: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    """Each of CIFAR-10's pickles by its file name; nothing is unpacked to disk.

    Raises pickle.UnpicklingError for a file that is not the published one, before it is unpickled.
    """
    known = _published()
    if unpacked.is_dir():
        for name in known:
            yield name, _unpickle(name, read_regular(unpacked / name, _LARGEST_BATCH), known[name])
        return
    with open_regular(archive, _LARGEST_ARCHIVE) as packed, tarfile.open(fileobj=packed) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and name in known:
                if member.size > _LARGEST_BATCH:
                    raise tarfile.ReadError(f"{name} is far too large")
                member_file = tar.extractfile(member)
                assert member_file is not None
                yield name, _unpickle(name, member_file.read(), known[name])


def _published() -> dict[str, str]:
    """The MD5 of each published batch, by its name."""
    from torchvision.datasets import CIFAR10

    return dict(CIFAR10.train_list + CIFAR10.test_list)


def _unpickle(name: str, content: bytes, md5: str) -> dict[bytes, Any]:
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise pickle.UnpicklingError(f"{name} is not the published file")
    batch: dict[bytes, Any] = pickle.loads(content, encoding="bytes")
    return batch


def _part(batch: dict[bytes, Any]) -> Images:
    """Images of one pickle: rows of 3,072 bytes, the three colour planes one after the other."""
    planes = torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32)
    return Images(planes.permute(0, 2, 3, 1).contiguous(), torch.tensor(batch[b"labels"]))
