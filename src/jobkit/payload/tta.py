"""Test-time augmentation: the mean of a model's logits over changed copies of each test image."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Predict = Callable[[Tensor], Tensor]


def predicted(predict: Predict, images: Tensor, how: str) -> Tensor:
    """Logits (N, classes) of images (N, 3, H, W), averaged as --tta says.

    flip: over the image and its mirror image. flip_shift: half of it over these, half over both
    shifted by a pixel, up and left, and down and right.
    """
    if how == "none":
        return predict(images)
    both = _mirrored(predict, images)
    if how == "flip":
        return both
    height, width = images.shape[2:]
    border = F.pad(images, (1, 1, 1, 1), mode="reflect")
    first, second = (
        _mirrored(predict, border[:, :, i : i + height, i : i + width]) for i in (0, 2)
    )
    return both / 2 + (first + second) / 4


def _mirrored(predict: Predict, images: Tensor) -> Tensor:
    return (predict(images) + predict(images.flip(3))) / 2
