"""What a data source gives: images and labels."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

IMAGE = (32, 32, 3)  # height, width, channels
Say = Callable[[str], None]


@dataclass(frozen=True)
class Images:
    """One part of a data set: images (N, 32, 32, 3) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor
