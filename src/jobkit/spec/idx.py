"""IDX files, in which MNIST and its like are published: what their heads promise, without torch.

A file is a head (two zeros, the type of its numbers, the number of its dimensions, then each as 4
bytes, big-endian) and the numbers; maybe packed by gzip. http://yann.lecun.com/exdb/mnist
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.files import open_regular

_UNSIGNED_BYTE = 8
_MOST_BYTES = 1 << 30  # unpacked; MNIST has 47 million
FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def find(folder: Path) -> dict[str, Path]:
    """The four files of a data set, packed or not. Raises UsageError for one that is not there."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory of IDX files")
    found = {}
    for part, name in FILES.items():
        names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
        there = [folder / n for n in names if (folder / n).is_file()]
        if not there:
            raise UsageError(f"{folder}: has no {name} or {name}.gz")
        found[part] = there[0]
    return found


def read(path: Path, dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """The shape and the bytes of a file. Raises UsageError for all that it does not hold whole."""
    try:
        with open_regular(path, _MOST_BYTES) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            shape = _shape(file.read(4 + 4 * dimensions), dimensions)
            size = math.prod(shape)
            if size > _MOST_BYTES:
                raise ValueError(f"its head promises {size:,} bytes")
            content = file.read(size + 1)  # no more than promised, however much is packed
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path}: not a readable IDX file: {error}") from None
    if len(content) != size:
        what = "more" if len(content) > size else f"{len(content):,}"
        raise UsageError(f"{path}: corrupt: {size:,} bytes promised by its head, {what} there")
    return shape, content


def _shape(head: bytes, dimensions: int) -> tuple[int, ...]:
    """The dimensions in a head. Raises ValueError for another kind of file."""
    if len(head) < 4 + 4 * dimensions or head[:2] != b"\0\0":
        raise ValueError("it has no head")
    if head[2] != _UNSIGNED_BYTE or head[3] != dimensions:
        raise ValueError(f"it is not unsigned bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    if not all(shape):
        raise ValueError("it is empty")
    return shape
