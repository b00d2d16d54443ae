"""CIFAR-10: fetching it once, and reading it without unpacking it to disk."""

import hashlib
import io
import itertools
import pickle
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jobkit.errors import UsageError
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


# The classes in a pickled dictionary of bytes, lists and numpy arrays.
_ARRAYS = frozenset(
    itertools.product(
        ("numpy.core.multiarray", "numpy._core.multiarray"), ("_reconstruct", "scalar")
    )
) | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


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
            ValueError, AttributeError) as error:  # fmt: skip
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
    beside = archive.with_name(f".{archive.name}.part")
    try:
        with urllib.request.urlopen(CIFAR10.url, timeout=_NO_ANSWER_S) as answer:
            digest = _save(answer, int(answer.headers.get("Content-Length") or 0), beside, say)
        if digest != CIFAR10.tgz_md5:
            raise _absent(data_dir, f"was downloaded with a wrong checksum from {CIFAR10.url}")
        beside.replace(archive)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise _absent(data_dir, f"cannot be downloaded ({error})") from None
    finally:
        beside.unlink(missing_ok=True)


def _save(answer: Any, total: int, path: Path, say: Say) -> str:
    """Write an answer to a file with progress lines; return its MD5, as published."""
    digest, done, said = hashlib.md5(usedforsecurity=False), 0, 0
    with path.open("wb") as file:
        while block := answer.read(1 << 20):
            file.write(block)
            digest.update(block)
            done += len(block)
            if total and done * 10 // total > said:
                said = done * 10 // total
                say(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")
    return digest.hexdigest()


def _batches(unpacked: Path, archive: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    """Each of CIFAR-10's pickles by its file name; nothing is unpacked to disk."""
    if unpacked.is_dir():
        for path in [*unpacked.glob("data_batch_*"), unpacked / "test_batch"]:
            with path.open("rb") as file:
                yield path.name, restricted_load(file, _ARRAYS, "bytes")
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and (name.startswith("data_batch_") or name == "test_batch"):
                member_file = tar.extractfile(member)
                assert member_file is not None
                yield name, restricted_load(io.BytesIO(member_file.read()), _ARRAYS, "bytes")


def _part(batch: dict[bytes, Any]) -> Images:
    """Images of one pickle: rows of 3,072 bytes, the three colour planes one after the other."""
    planes = torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32)
    labels = torch.tensor(batch[b"labels"])
    if len(planes) != len(labels):
        raise ValueError(f"{len(planes)} images and {len(labels)} labels")
    return Images(planes.permute(0, 2, 3, 1).contiguous(), labels)
