"""MNIST-like data in IDX files, written byte by byte."""

import gzip
import math
import struct
from pathlib import Path

from jobkit.spec.dataset import IDX_FILES


def idx_bytes(*shape: int, content: bytes | None = None, kind: int = 8) -> bytes:
    """An IDX file of unsigned bytes: 0, 1, 2 ... where no content is given."""
    body = bytes(i % 10 for i in range(math.prod(shape))) if content is None else content
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def write_idx(folder: Path, packed: bool = False) -> Path:
    """A small data set of images of 28 x 28 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 30), ("test", 10)):
        for what, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            name, content = IDX_FILES[f"{part}_{what}"], idx_bytes(*shape)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder
