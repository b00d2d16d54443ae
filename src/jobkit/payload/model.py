"""The models: two small CNNs, a ResNet-18 and an MLP for 32 x 32 images, or the user's own."""

import contextlib
import importlib
import inspect
import os
import sys

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.payload.recipe import FastCNN
from jobkit.spec.runspec import RunSpec


def check_shape(x: Tensor, *shape: int) -> None:
    """Assert the shape of all but the first dimension."""
    assert x.shape[1:] == shape, x.shape


torch.fx.wrap("check_shape")  # one call in a traced forward pass, not a branch


class Stage(nn.Module):
    """A 3 x 3 convolution, a pooling that halves height and width, and ReLU.

    ReLU last: the same bits as before the pooling, for a quarter of its work.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels_out, H/2, W/2)."""
        return F.relu(F.max_pool2d(self.conv(x), 2), inplace=True)


class CNN(nn.Module):
    """Three convolutions and two linear layers; width multiplies every hidden size.

    The assertions hold for any batch size: they fix all but the first dimension.
    """

    def __init__(self, num_classes: int, width: int = 1) -> None:
        super().__init__()
        self.width = width
        self.stage1 = Stage(3, 32 * width)
        self.stage2 = Stage(32 * width, 64 * width)
        self.stage3 = Stage(64 * width, 128 * width)
        self.hidden = nn.Linear(128 * width * 4 * 4, 256 * width)
        self.classifier = nn.Linear(256 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        check_shape(x, 3, 32, 32)
        x = self.stage1(x)
        check_shape(x, 32 * self.width, 16, 16)
        x = self.stage2(x)
        check_shape(x, 64 * self.width, 8, 8)
        x = self.stage3(x)
        check_shape(x, 128 * self.width, 4, 4)
        x = F.relu(self.hidden(x.flatten(1)))
        check_shape(x, 256 * self.width)
        return self.classifier(x)


def _resnet18(num_classes: int, width: int) -> nn.Module:
    """torchvision's ResNet-18 with a stem for small images: 3 x 3, stride 1, no pooling."""
    from torchvision.models import resnet18  # 1.3 s that the other models need not wait for

    if width != 1:
        raise UsageError("resnet18 has one width: leave --width at 1, or take the cnn")
    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _own(name: str, num_classes: int) -> nn.Module:
    """Call the user's factory, with num_classes where it takes that."""
    module_name, _, factory_name = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - as sys.path has it
        sys.path.append(here)  # last: nothing there takes the place of what is installed
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name}: {error} (looked in the current folder too)") from None
    words: dict[str, int] = {}
    try:
        with contextlib.suppress(ValueError):  # of C code, which does not say
            signature = inspect.signature(factory)
            words = {"num_classes": num_classes} if "num_classes" in signature.parameters else {}
            signature.bind(**words)
    except TypeError as error:
        raise UsageError(
            f"--model {name}: {error}; it is called with num_classes at most: give the others "
            "defaults"
        ) from None
    model = factory(**words)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: made a {type(model).__name__}, not a torch.nn.Module")
    return model


def build_model(spec: RunSpec, num_classes: int) -> nn.Module:
    """Make the model with weights from the run's seed: the same on every rank.

    Raises UsageError for a model that cannot be made or whose output has the wrong shape.
    """
    torch.manual_seed(spec.seed + spec.repeat)
    if ":" in spec.model:
        model = _own(spec.model, num_classes)
        _check_output(model, spec.model, num_classes)
        return model
    if spec.model == "mlp":
        first, second = spec.hidden or 512 * spec.width, spec.hidden or 256 * spec.width
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * 32 * 32, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, num_classes),
        )
    factory = {"cnn": CNN, "fast_cnn": FastCNN, "resnet18": _resnet18}[spec.model]
    return factory(num_classes, spec.width)


def _check_output(model: nn.Module, name: str, num_classes: int) -> None:
    """Try two blank images; the model's state and mode are left as they were."""
    training = model.training
    model.eval()
    with torch.no_grad():
        try:
            out = model(torch.zeros(2, 3, 32, 32))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise UsageError(f"--model {name}: fails on (2, 3, 32, 32) images: {error}") from None
    model.train(training)
    if not isinstance(out, Tensor) or out.shape != (2, num_classes):
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UsageError(f"--model {name}: gives {got} for 2 images, not (2, {num_classes})")
