"""The parts of the recipe, each alone: whitening, first filters, slow weights, augmented tests."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jobkit.errors import UsageError
from jobkit.payload.data.batches import MEAN, STD
from jobkit.payload.data.sources import synthetic
from jobkit.payload.fast_cnn import FastCNN, identity_convolution, whitening_filters
from jobkit.payload.lookahead import Lookahead, decay
from jobkit.payload.memory import held
from jobkit.payload.model import build_model
from jobkit.payload.parameter_groups import trained_parameters
from jobkit.payload.place import RankEnv
from jobkit.payload.progress import Progress
from jobkit.payload.strategies.ddp import DDP
from jobkit.payload.strategies.single import Single
from jobkit.payload.tta import predicted
from jobkit.spec.runspec import RunSpec

CPU = torch.device("cpu")


class _Batches:
    """The sizes of an epoch: batches of 8."""

    batch_size = 8

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)


def normalised(images: torch.Tensor) -> torch.Tensor:
    return ((images.float() - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)


# Whitening


def smooth_images(count: int) -> torch.Tensor:
    """Images whose neighbouring pixels and colours are much alike, as photographs' are."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    coarse += 2 * torch.rand(count, 1, 8, 8, generator=generator)
    fine = F.interpolate(coarse, (32, 32), mode="bilinear")
    fine += torch.randn(fine.shape, generator=generator) / 5
    return (fine * 80).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def covariance(responses: torch.Tensor) -> torch.Tensor:
    """Of the channels of (N, C, H, W), over all positions."""
    return torch.cov(responses.transpose(0, 1).flatten(1).double())


def test_the_filters_whiten_the_patches() -> None:
    images = smooth_images(700)  # three parts, the last one smaller
    before = covariance(F.unfold(normalised(images), 2))
    assert (before - torch.eye(12)).abs().max() > 0.5  # it is not white to begin with
    after = covariance(F.conv2d(normalised(images), whitening_filters(images)))
    assert (after - torch.eye(12)).abs().max() < 0.03


def test_directions_without_variance_stay_small() -> None:
    grey = torch.full((300, 32, 32, 3), 100, dtype=torch.uint8)
    filters = whitening_filters(grey)
    assert filters.isfinite().all()
    assert filters.abs().max() <= 5e-4**-0.5 * 1.001


def test_the_first_layer_is_seen_both_ways_and_is_not_trained() -> None:
    model = FastCNN(10)
    images = synthetic(600, 10)[0].images
    model.see(images)
    first, second = model.whitening.weight.chunk(2)
    assert torch.equal(first, -second)
    assert torch.equal(first, whitening_filters(images))  # all 600: fewer than are asked for
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    norms = {f"block{b}.layers.{i}.weight" for b in (1, 2, 3) for i in (2, 5)}
    assert frozen == {"whitening.weight", *norms}
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == [
        f"block{b}.layers.{i}.bias" for b in (1, 2, 3) for i in (2, 5)
    ]


def test_images_of_every_class_are_seen() -> None:
    """Sources are sorted by class: the first images alone would be of one."""
    dark, bright = smooth_images(5000) // 8, smooth_images(5000)
    model, first_alone = FastCNN(10), FastCNN(10)
    model.see(torch.cat([dark, bright]))
    first_alone.see(dark)
    both = whitening_filters(torch.cat([dark[::2], bright[::2]]))
    assert torch.allclose(model.whitening.weight[:12], both)
    assert not torch.allclose(first_alone.whitening.weight, model.whitening.weight, rtol=0.1)


# The network


def identical(weight: torch.Tensor) -> bool:
    """Whether a filter passes one channel on, as it is."""
    return int((weight != 0).sum()) == 1


@pytest.mark.parametrize(("channels_in", "channels_out"), [(4, 9), (5, 5), (24, 16)])
def test_convolutions_begin_as_the_identity(channels_in: int, channels_out: int) -> None:
    x, count = torch.randn(2, channels_in, 6, 6), min(channels_in, channels_out)
    made = identity_convolution(channels_in, channels_out)
    with torch.no_grad():
        assert torch.allclose(made(x)[:, :count], x[:, :count])
    assert not any(identical(w) for w in made.weight[count:])


@pytest.mark.parametrize("width", [1, 4])
def test_the_fast_cnn_takes_any_batch_and_width(width: int) -> None:
    model = FastCNN(7, width)
    assert model(torch.zeros(3, 3, 32, 32)).shape == (3, 7)
    assert model.head.weight.shape == (7, 64 * width)
    assert model.head.weight.std().item() == pytest.approx(1.0)


# The optimizer


def test_biases_learn_faster_and_shrink_alike() -> None:
    spec = RunSpec(bias_lr_factor=8.0, weight_decay=0.4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    others, biases = trained_parameters(model, spec)
    assert [p.shape for p in others["params"]] == [(4, 3), (2, 4)]
    assert [p.shape for p in biases["params"]] == [(4,)]
    assert (biases["lr_factor"], biases["weight_decay"]) == (8.0, 0.05)
    assert trained_parameters(model, RunSpec()) == list(model.parameters())


def test_lookahead_is_the_formula_written_out() -> None:
    """Ten epochs of one step each of SGD on a known gradient, in plain numbers beside torch's."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    progress = Progress()
    trainer = SimpleNamespace(
        spec=RunSpec(lookahead_every=3, epochs=10),
        optimizer=optimizer,
        progress=progress,
        batches=_Batches(6),
    )
    Lookahead(trainer)  # type: ignore[arg-type]
    own, slow = [1.0, -2.0], None
    for step in range(1, 11):
        weight.grad = 2 * weight.detach()
        optimizer.step()
        own = [w - 0.1 * 2 * w for w in own]
        slow = slow or list(own)
        if step in (3, 6, 9, 10):
            kept = 0.95**3 * (step / 10) ** 3
            slow = [kept * s + (1 - kept) * w for s, w in zip(slow, own, strict=True)]
            own = list(slow)
        assert weight.tolist() == pytest.approx(own, rel=1e-12)
        assert optimizer.state[weight]["slow"].tolist() == pytest.approx(slow, rel=1e-12)
        progress.step(6)
        progress.next_epoch()
    assert decay(5, 1.0) == pytest.approx(0.95**5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_slow_weights_are_counted_in_memory(kind: str) -> None:
    spec = RunSpec(model="fast_cnn", optimizer=kind, lookahead_every=2, strategy="single")
    strategy = Single(spec, RankEnv(), CPU)
    strategy.setup(build_model(spec, 10))
    from jobkit.payload.strategies.base import make_optimizer

    optimizer = make_optimizer(strategy)
    progress, batches = Progress(), _Batches(80)
    trainer = SimpleNamespace(spec=spec, optimizer=optimizer, progress=progress, batches=batches)
    Lookahead(trainer)  # type: ignore[arg-type]
    strategy.forward_backward(torch.randn(8, 3, 32, 32), torch.arange(8), 1 / 8, True)
    optimizer.step()
    model = strategy.model
    assert held(model, optimizer) == strategy.persistent(model.parameters(), model.buffers())


@pytest.mark.parametrize("setting", [{"lookahead_every": 5}, {"bias_lr_factor": 2.0}])
def test_zero1_has_no_part_in_it(setting: dict[str, float]) -> None:
    spec = RunSpec(strategy="ddp", zero1=True, **setting)
    with pytest.raises(UsageError, match="leave out one or the other"):
        DDP(spec, RankEnv(), CPU).check()


def test_the_loss_is_of_smoothed_labels() -> None:
    logits, labels = torch.randn(6, 10, dtype=torch.float64), torch.arange(6)
    strategy = Single(RunSpec(strategy="single", label_smoothing=0.3), RankEnv(), CPU)
    strategy.model = nn.Identity()
    found = strategy.forward_backward(logits.requires_grad_(), labels, 1.0, True)
    target = 0.7 * F.one_hot(labels, 10) + 0.3 / 10
    expected = -(target * logits.log_softmax(1)).sum()
    assert found.item() == pytest.approx(expected.item())


# Test-time augmentation


def test_tta_averages_over_mirror_images_and_shifts() -> None:
    seen: list[torch.Tensor] = []

    def predict(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return images[:, :2, 5, 7] ** 2  # one pixel of two channels, and nothing symmetric

    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(predicted(predict, x, "none"), predict(x))
    pixel = {(i, j): x[:, :2, 5 + i, j] ** 2 for i in (-1, 0, 1) for j in range(32)}
    flip = (pixel[0, 7] + pixel[0, 24]) / 2
    assert torch.allclose(predicted(predict, x, "flip"), flip)
    # Shifted down and right a pixel shows its upper left neighbour; and so mirrored.
    shifts = [(pixel[-1, 6] + pixel[-1, 23]) / 2, (pixel[1, 8] + pixel[1, 25]) / 2]
    seen.clear()
    found = predicted(predict, x, "flip_shift")
    assert torch.allclose(found, flip / 2 + (shifts[0] + shifts[1]) / 4)
    assert [tuple(images.shape) for images in seen] == [(3, 3, 32, 32)] * 6
