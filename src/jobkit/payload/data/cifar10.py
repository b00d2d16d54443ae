"""CIFAR-10: fetching it once, and reading it without unpacking it to disk."""

import contextlib
import hashlib
import io
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
from jobkit.payload.unpickle import restricted_load

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
_ROW = 3072


class _Dtype:
    """Stands for numpy.dtype in a pickle: unsigned bytes, and nothing else."""

    def __init__(self, name: object = None, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: single bytes have none."""


class _Array:
    """Stands for numpy.ndarray in a pickle: rows of 3,072 bytes, checked.

    No array of numpy's is made of a pickle: its state has addresses and sizes that numpy trusts.
    """

    rows: bytes = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_column, rows = state
        whole = type(shape) is tuple and [type(n) for n in shape] == [int, int]
        fine = whole and isinstance(dtype, _Dtype) and not by_column and isinstance(rows, bytes)
        if not fine or shape[1] != _ROW or shape[0] * _ROW != len(rows):
            raise pickle.UnpicklingError(f"an array that is not rows of {_ROW:,} bytes")
        self.rows = rows


def _reconstruct(*_: object) -> _Array:
    """Stands for numpy's function of that name."""
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """Stands for codecs.encode: by it Python 3 writes bytes into the pickles of Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("bytes in an encoding that these files never have")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


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
    except (OSError, EOFError, tarfile.TarError, pickle.UnpicklingError, LookupError, TypeError,
            ValueError, AttributeError, zlib.error) as error:  # fmt: skip
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
    """Each of CIFAR-10's pickles by its file name; nothing is unpacked to disk."""
    if unpacked.is_dir():
        for path in [*unpacked.glob("data_batch_*"), unpacked / "test_batch"]:
            yield path.name, _unpickle(read_regular(path, _LARGEST_BATCH))
        return
    with open_regular(archive, _LARGEST_ARCHIVE) as packed, tarfile.open(fileobj=packed) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.offset_data + member.size > _LARGEST_ARCHIVE:
                raise tarfile.ReadError("it is far too large")
            if member.isfile() and (name.startswith("data_batch_") or name == "test_batch"):
                if member.size > _LARGEST_BATCH:
                    raise tarfile.ReadError(f"{name} is far too large")
                member_file = tar.extractfile(member)
                assert member_file is not None
                yield name, _unpickle(member_file.read())


def _unpickle(content: bytes) -> dict[bytes, Any]:
    """A batch's dictionary; pickle.UnpicklingError for all else."""
    batch = restricted_load(io.BytesIO(content), (), "bytes", _STAND_INS)
    if type(batch) is not dict:
        raise pickle.UnpicklingError("no dictionary")
    return batch


def _part(batch: dict[bytes, Any]) -> Images:
    """Images of one pickle: rows of 3,072 bytes, the three colour planes one after the other."""
    data, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(data, _Array) or type(labels) is not list:
        raise TypeError("no array of images or no list of labels")
    if len(data.rows) != len(labels) * _ROW or not labels:
        raise ValueError(f"{len(data.rows) // _ROW} images and {len(labels)} labels")
    if not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise ValueError("a label that is no class")
    planes = torch.frombuffer(bytearray(data.rows), dtype=torch.uint8).reshape(-1, 3, 32, 32)
    return Images(planes.permute(0, 2, 3, 1).contiguous(), torch.tensor(labels))
