"""The parts of the speed run: `--recipe fast`, or --speed-run with any model.

By the ideas and with the hyperparameters of Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a
Single GPU" (arXiv 2404.00498; github.com/KellerJordan/cifar10-airbench), after tysam-code's
hlb-CIFAR10 and David Page's "How to train your ResNet". That it reaches 94 % is a target until a
GPU has seen it. Alternating flips and crops with reflected borders are in batches.py, the rate
between 20 % and 7 % of the peak in train.py; labels are smoothed by 0.2.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from jobkit.payload.batches import MEAN, STD
from jobkit.spec.runspec import RunSpec

CHANNELS = (16, 64, 64)  # of the three blocks at width 1; width 4 is the published network
_PATCH = 2  # pixels on each side
_IMAGES = 5000  # that the whitening is computed from
_AT_ONCE = 250  # of them: their patches take 23 MB
_MIN_VARIANCE = 5e-4  # added to each, so that directions of noise are not made large
_LOGIT_SCALE = 1 / 9
_BIAS_RATE = 64.0  # factor on the rate of the normalisations' biases; divides their weight decay
_WHITENING_EPOCHS = 3  # in which the whitening's bias is trained
_LOOKAHEAD_EVERY = 5  # steps between moves of the weights to their slow average
_LOOKAHEAD_DECAY = 0.95  # of the slow average, per step, at the end of the training


class FastCNN(nn.Module):
    """A whitening layer, three blocks of two convolutions, and one linear layer without bias."""

    def __init__(self, num_classes: int, width: int = 1) -> None:
        super().__init__()
        outputs = 2 * 3 * _PATCH * _PATCH  # each direction and its negative
        self.whitening = nn.Conv2d(3, outputs, _PATCH)
        self.whitening.weight.requires_grad_(False)
        self.activation = nn.GELU()
        first, second, third = (channels * width for channels in CHANNELS)
        self.block1 = Block(outputs, first)
        self.block2 = Block(first, second)
        self.block3 = Block(second, third)
        self.pool = nn.Sequential(nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(third, num_classes, bias=False)
        with torch.no_grad():
            nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
            self.head.weight /= self.head.weight.std()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.block1(self.activation(self.whitening(x)))
        return self.head(self.pool(self.block3(self.block2(x)))) * _LOGIT_SCALE

    @torch.no_grad()
    def fit_whitening(self, images: Tensor) -> None:
        """Compute the first layer from training images (N, 32, 32, 3) uint8, before the training.

        Evenly spread ones are used: sources are sorted by class.
        """
        count = min(_IMAGES, len(images))
        filters = whitening_filters(images[torch.arange(count) * len(images) // count])
        self.whitening.weight.copy_(torch.cat([filters, -filters]))


class Block(nn.Sequential):
    """Two 3 x 3 convolutions with normalisation and GELU; the first one's result is pooled.

    Maps (N, channels_in, H, W) to (N, channels_out, H/2, W/2), rounded down.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        layers = nn.Sequential(
            identity_convolution(channels_in, channels_out),
            nn.MaxPool2d(2),
            normalisation(channels_out),
            nn.GELU(),
            identity_convolution(channels_out, channels_out),
            normalisation(channels_out),
            nn.GELU(),
        )
        super().__init__(OrderedDict(layers=layers))  # a name in checkpoints


def identity_convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
    """A 3 x 3 convolution whose first channels_in outputs are, at first, its inputs."""
    layer = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:channels_in])
    return layer


def normalisation(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation that learns a bias alone; its statistics forget after few batches."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


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
    vectors = vectors * largest.sign() / torch.sqrt(values.clamp(min=0) + _MIN_VARIANCE)
    return vectors.T.reshape(-1, 3, _PATCH, _PATCH).float()


def trained_parameters(model: nn.Module, spec: RunSpec) -> list[Any]:
    """What an optimizer trains: the parameters, under --speed-run groups with other rates.

    The training loop gives each group its rate: lr_factor times that of the schedule, and none
    from the epoch last_epoch on.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not spec.speed_run:
        return list(trained.values())
    whitening = [p for name, p in trained.items() if name.endswith("whitening.bias")]
    biases = [p for name, p in trained.items() if name.endswith("bias") and "whitening" not in name]
    others = [p for p in trained.values() if p not in {*whitening, *biases}]
    decay = spec.weight_decay / _BIAS_RATE  # so that both shrink alike
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": biases, "lr_factor": _BIAS_RATE, "weight_decay": decay},
        {"params": whitening, "last_epoch": _WHITENING_EPOCHS},
    ]
    return [group for group in groups if group["params"]]


def look_ahead(trainer: Any) -> None:
    """Have slow weights beside those of a train.Trainer, averaged after its optimizer's steps.

    They are in the optimizer's state of each parameter, as `slow`: so they are sharded as it is,
    counted in memory, and in checkpoints. They begin as the weights after the first step. The
    method is Zhang et al., "Lookahead Optimizer" (arXiv 1907.08610). What the average keeps of
    itself rises with the cube of the training's progress; after the last step the weights are it.
    """

    @torch.no_grad()
    def after_step(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and "slow" not in optimizer.state[parameter]:
                    optimizer.state[parameter]["slow"] = parameter.detach().clone()
        batches, progress = trainer.batches, trainer.progress
        position = min(progress.position + batches.batch_size, batches.samples)
        epochs = trainer.total_steps / len(batches)
        share = min(1.0, (progress.epoch + position / batches.samples) / epochs)  # that is done
        moves = (progress.iteration + 1) % _LOOKAHEAD_EVERY == 0
        if not moves and share < 1:
            return
        keeps = _LOOKAHEAD_DECAY**_LOOKAHEAD_EVERY * share**3 if moves else 1.0
        for parameter, state in optimizer.state.items():
            if "slow" in state:
                state["slow"].lerp_(parameter, 1 - keeps)
                parameter.copy_(state["slow"])

    trainer.optimizer.register_step_post_hook(after_step)


def predict_flipped(predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Logits (N, classes) of images (N, 3, H, W) by test-time augmentation.

    Half of the mean over each image and its mirror image, half over both shifted by a pixel, up and
    left, and down and right.
    """
    height, width = images.shape[2:]
    border = F.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = [border[:, :, i : i + height, i : i + width] for i in (0, 2)]
    means = [(predict(view) + predict(view.flip(3))) / 2 for view in (images, *shifted)]
    return means[0] / 2 + (means[1] + means[2]) / 4
