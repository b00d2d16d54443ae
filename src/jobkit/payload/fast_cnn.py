"""A small convolutional network that learns in few epochs: `--model fast_cnn`.

Written from the ideas of Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU"
(arXiv 2404.00498), after tysam-code's hlb-CIFAR10 and David Page's "How to train your ResNet": a
frozen first layer that whitens patches, filters that begin as the identity, batch normalisation
without a weight. Width 4 has the channels of the published network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.payload.batches import MEAN, STD

CHANNELS = (16, 64, 64)  # of the three blocks at width 1
_PATCH = 2  # pixels on each side
_IMAGES = 5000  # that the whitening is computed from
_AT_ONCE = 250  # of them: their patches take 23 MB
_LEAST_VARIANCE = 5e-4  # added to each, so that directions of noise are not made large
_LOGIT_SCALE = 1 / 9


class FastCNN(nn.Module):
    """A whitening layer, three blocks of two convolutions, and one linear layer without bias."""

    def __init__(self, num_classes: int, width: int = 1) -> None:
        super().__init__()
        outputs = 2 * 3 * _PATCH * _PATCH  # each direction and its negative
        self.whitening = nn.Conv2d(3, outputs, _PATCH, bias=False).requires_grad_(False)
        self.activation = nn.GELU()
        first, second, third = (channels * width for channels in CHANNELS)
        self.block1 = Block(outputs, first)
        self.block2 = Block(first, second)
        self.block3 = Block(second, third)
        self.pool = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.head = nn.Linear(third, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.block1(self.activation(self.whitening(x)))
        x = self.block3(self.block2(x))
        logits: Tensor = self.head(self.pool(x)) * _LOGIT_SCALE
        return logits

    @torch.no_grad()
    def see(self, images: Tensor) -> None:
        """Compute the first layer from training images (N, 32, 32, 3) uint8, before the training.

        Evenly spread ones are used: sources are sorted by class.
        """
        chosen = torch.arange(min(_IMAGES, len(images))) * len(images) // min(_IMAGES, len(images))
        filters = whitening_filters(images[chosen])
        self.whitening.weight.copy_(torch.cat([filters, -filters]))


class Block(nn.Module):
    """Two 3 x 3 convolutions with normalisation and GELU; the first one's result is pooled."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            identity_convolution(channels_in, channels_out),
            nn.MaxPool2d(2),
            normalisation(channels_out),
            nn.GELU(),
            identity_convolution(channels_out, channels_out),
            normalisation(channels_out),
            nn.GELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels_out, H/2, W/2), rounded down."""
        result: Tensor = self.layers(x)
        return result


def identity_convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
    """A 3 x 3 convolution whose first channels_in outputs are, at first, its inputs."""
    made = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:channels_in])
    return made


def normalisation(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation that learns a bias alone; its statistics forget after few batches."""
    made = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    made.weight.requires_grad_(False)
    return made


def whitening_filters(images: Tensor) -> Tensor:
    """Filters (12, 3, 2, 2) whose outputs over the images' patches have covariance near identity.

    images: (N, 32, 32, 3) uint8. The filters are the eigenvectors of the covariance matrix C of
    the normalised patches, each divided by the square root of its eigenvalue: W C W^T = 1.
    """
    moment, total = torch.zeros(()), torch.zeros(())
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    for part in images.split(_AT_ONCE):
        planes = ((part.float() - mean) / std).permute(0, 3, 1, 2)
        patches = F.unfold(planes, _PATCH).transpose(1, 2).reshape(-1, 3 * _PATCH**2).double()
        moment, total = moment + patches.T @ patches, total + patches.sum(0)
    count = len(images) * 31 * 31
    centre = total / count
    values, vectors = torch.linalg.eigh(moment / count - torch.outer(centre, centre))
    # An eigenvector's sign is the library's choice: with one rule every rank has the same.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = vectors * largest.sign() / torch.sqrt(values.clamp(min=0) + _LEAST_VARIANCE)
    return vectors.T.reshape(-1, 3, _PATCH, _PATCH).float()
