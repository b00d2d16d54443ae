"""The models, the user's own, and the parts of the recipe, each alone."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jobkit.errors import UsageError
from jobkit.payload import run
from jobkit.payload.batches import MEAN, STD, Batches, Progress
from jobkit.payload.model import CNN, build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.recipe import (
    FastCNN,
    identity_convolution,
    look_ahead,
    predict_flipped,
    trained_parameters,
    whitening_filters,
)
from jobkit.payload.strategies.local import Single
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from support.refusals import error_of

OWN = """
import torch
from torch import nn

class Fine(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(3072, num_classes))

class Crash(nn.Linear):
    def __init__(self):
        super().__init__(3072, 10)

ten = lambda: Fine(10)
wrong = lambda: Fine(7)
nothing = lambda: None
greedy = lambda num_classes, depth, width=2: Fine(num_classes)
number = 3
"""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("width", "count"), [(1, 7), (2, 1)])
def test_the_cnn_takes_any_batch_and_width(width: int, count: int) -> None:
    model = CNN(10, width)
    assert model(torch.zeros(count, 3, 32, 32)).shape == (count, 10)
    assert model.hidden.weight.shape == (256 * width, 2048 * width)
    for shape in ((2, 3, 28, 28), (2, 1, 32, 32)):
        with pytest.raises(AssertionError):
            model(torch.zeros(shape))


@pytest.mark.parametrize(
    "name", ["cnn", "fast_cnn", "mlp", "resnet18", "own_models:Fine", "own_models:ten"]
)
def test_a_model_is_the_same_for_the_same_seed_and_other_for_another(name: str) -> None:
    def weights(spec: RunSpec) -> torch.Tensor:
        return torch.cat([p.flatten() for p in build_model(spec, 10).parameters()])

    first = weights(RunSpec(model=name, seed=1))
    assert torch.equal(first, weights(RunSpec(model=name, seed=1)))
    assert torch.equal(first, weights(RunSpec(model=name, repeat=1)))
    assert not torch.equal(first, weights(RunSpec(model=name, seed=2)))


def test_resnet18_keeps_small_images_large() -> None:
    model = build_model(RunSpec(model="resnet18"), 10).eval()
    assert isinstance(model.maxpool, nn.Identity)
    assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    with pytest.raises(UsageError, match="resnet18 has one width"):
        build_model(RunSpec(model="resnet18", width=2), 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_models:absent", "has no attribute 'absent'"),
        ("builtins:dict", "made a dict, not a torch.nn.Module"),
        ("own_models:number", "3 is not a callable object"),
        ("own_models:greedy", "missing a required argument: 'depth'"),
        ("own_models:nothing", "made a NoneType, not a torch.nn.Module"),
        ("own_models:wrong", "gives (2, 7) for 2 images, not (2, 10)"),
        ("own_models:Crash", "fails on (2, 3, 32, 32) images: "),
    ],
)
def test_a_model_of_the_users_that_cannot_be_used_says_why(name: str, message: str) -> None:
    said = error_of(build_model, RunSpec(model=name), 10)
    assert said.startswith(f"--model {name}: ") and message in said


@pytest.mark.parametrize(
    ("device", "settings", "ranks", "samples", "line"),
    [
        ("cpu", {}, 1, 100, "global batch of 512 is more than the 100 training samples"),
        ("cpu", {}, 10_000, 1000, "10000 ranks share"),
        ("cuda", {}, 10_000, 1000, "1 CPU core for each GPU: .* give --cpus-per-task=8"),
        ("", {"ranks_per_node": 2}, 1, 1000, "statistics over each rank's own part"),
        ("", {"ranks_per_node": 2, "strategy": "pp"}, 1, 1000, "statistics over each microbatch"),
        ("", {"ranks_per_node": 2, "strategy": "mp"}, 1, 1000, None),
        ("", {}, 1, 1000, None),
        # Settings without effect.
        ("cpu", {"strategy": "fsdp", "ddp_bucket_mib": 3.0}, 1, 1000, "^--ddp-bucket-mib has no"),
        ("cpu", {"microbatches": 2}, 1, 1000, "^--microbatches has no .*: it needs strategy pp"),
        ("cpu", {"momentum": 0.5}, 1, 1000, None),
        ("cpu", {"model": "mlp", "hidden": 8}, 1, 1000, None),
        ("cpu", {"model": "mlp", "hidden": 8, "width": 2}, 1, 1000, "^--width has no effect"),
        ("cpu", {"hidden": 8}, 1, 1000, "^--hidden has no effect: it needs --model mlp"),
        ("cpu", {"model": "m:f", "width": 2}, 1, 1000, "^--width has no effect"),
        ("cpu", {"compile_mode": "max-autotune"}, 1, 1000, "effect: it needs --compile$"),
        ("cpu", {"speed_run": True, "lr_schedule": "cosine"}, 1, 1000, "^--lr-schedule has no"),
    ],
)
def test_what_spoils_numbers_or_does_nothing_is_told(
    device: str, settings: dict[str, Any], ranks: int, samples: int, line: str | None
) -> None:
    place = RankEnv(world_size=ranks, local_world_size=ranks)
    said = [*run.warnings_of(RunSpec(**settings), place, device, samples, normalised=not device)]
    assert len(said) == (line is not None)
    assert line is None or re.search(line, said[0])


@pytest.mark.parametrize("cores", [3, 4])
def test_a_gpu_wants_four_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(run, "share_of_cores", lambda _: cores)
    said = [*run.warnings_of(RunSpec(), RankEnv(), "cuda", 1000, normalised=False)]
    assert [line.startswith("3 CPU cores for each GPU") for line in said] == [True] * (cores < 4)


def normalised(images: torch.Tensor) -> torch.Tensor:
    return ((images.float() - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)


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


def test_the_first_layer_whitens_images_of_every_class_both_ways_and_is_not_trained() -> None:
    images, model = smooth_images(700), FastCNN(10)  # in three parts, the last one smaller
    before = covariance(F.unfold(normalised(images), 2))
    assert (before - torch.eye(12)).abs().max() > 0.5  # it is not white to begin with
    model.fit_whitening(images)
    first, second = model.whitening.weight.chunk(2)
    assert torch.equal(first, -second)
    after = covariance(F.conv2d(normalised(images), first))
    assert (after - torch.eye(12)).abs().max() < 0.03
    # Sources are sorted by class: the first images alone would be of one.
    both = torch.cat([smooth_images(5000) // 8, smooth_images(5000)])
    model.fit_whitening(both)
    assert torch.allclose(model.whitening.weight[:12], whitening_filters(both[::2]))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        "whitening.weight",
        *(f"block{b}.layers.{i}.weight" for b in (1, 2, 3) for i in (2, 5)),
    }


@torch.no_grad()
def test_convolutions_begin_as_the_identity() -> None:
    for channels_in, channels_out in ((4, 9), (24, 16)):
        x, count = torch.randn(2, channels_in, 6, 6), min(channels_in, channels_out)
        layer = identity_convolution(channels_in, channels_out)
        assert torch.allclose(layer(x)[:, :count], x[:, :count])
        assert all(int((w != 0).sum()) > 1 for w in layer.weight[count:])


def test_the_fast_cnn_takes_any_batch_and_width_and_can_be_deterministic(monkeypatch) -> None:
    """torch has no deterministic backward pass of an adaptive pooling on a GPU."""
    monkeypatch.setattr(F, "adaptive_max_pool2d", lambda *_, **__: pytest.fail("adaptive"))
    for width in (1, 4):
        model, x = FastCNN(7, width), torch.randn(3, 3, 32, 32)
        assert model(x).shape == (3, 7)
        assert model.head.weight.shape == (7, 64 * width)
        assert model.head.weight.std().item() == pytest.approx(1.0)
        pooled = model.block3(model.block2(model.block1(model.activation(model.whitening(x)))))
        assert pooled.shape[2:] == (3, 3)
        assert torch.equal(model.pool(pooled), pooled.amax((2, 3)))


def test_biases_learn_faster_and_that_of_the_whitening_for_three_epochs() -> None:
    spec, model = RunSpec(speed_run=True, weight_decay=0.64), FastCNN(10)
    others, biases, whitening = trained_parameters(model, spec)
    assert {p.shape for p in biases["params"]} == {(16,), (64,)} and len(biases["params"]) == 6
    assert (biases["lr_factor"], biases["weight_decay"]) == (64.0, 0.01)
    assert [p.shape for p in whitening["params"]] == [(24,)]
    assert len(others["params"]) == 7  # six convolutions and the last layer
    every = [p for p in model.parameters() if p.requires_grad]
    assert trained_parameters(model, RunSpec()) == every
    trainer = SimpleNamespace(
        spec=spec, peak_lr=0.1, progress=Progress(), batches=Batches(64, 64, 0, 1, 1, 0),
        optimizer=torch.optim.SGD([others, biases, whitening], lr=1.0),
    )  # fmt: skip
    rates = []
    for trainer.progress.epoch in (2, 3):
        Trainer._set_rate(trainer)  # type: ignore[arg-type]
        first, second, third = (group["lr"] for group in trainer.optimizer.param_groups)
        assert second == pytest.approx(64 * first)
        rates.append(third / first)
    assert rates == [1.0, 0.0]


def test_lookahead_is_the_formula_written_out() -> None:
    """Twelve epochs of one step of SGD on a known gradient, in plain numbers beside torch's."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    trainer = SimpleNamespace(
        optimizer=optimizer,
        progress=(progress := Progress()),
        batches=Batches(6, 8, 0, 1, 1, 0),
        total_steps=12,
    )
    look_ahead(trainer)
    own, slow = [1.0, -2.0], None
    for step in range(1, 13):
        weight.grad = 2 * weight.detach()
        optimizer.step()
        own = [w - 0.1 * 2 * w for w in own]
        slow = slow or list(own)
        if step in (5, 10):
            kept = 0.95**5 * (step / 12) ** 3
            slow = [kept * s + (1 - kept) * w for s, w in zip(slow, own, strict=True)]
        if step in (5, 10, 12):  # in the end the weights are the average, as published
            own = list(slow)
        assert weight.tolist() == pytest.approx(own, rel=1e-12)
        assert optimizer.state[weight]["slow"].tolist() == pytest.approx(slow, rel=1e-12)
        progress.iteration, progress.epoch, progress.position = step, step, 0


def test_the_loss_is_of_smoothed_labels() -> None:
    logits, labels = torch.randn(6, 10, dtype=torch.float64), torch.arange(6)
    strategy = Single(RunSpec(strategy="single", speed_run=True), RankEnv(), CPU)
    strategy.model = nn.Identity()
    loss = strategy.forward_backward(logits.requires_grad_(), labels, 1.0, True)
    target = 0.8 * F.one_hot(labels, 10) + 0.2 / 10
    expected = -(target * logits.log_softmax(1)).sum()
    assert loss.item() == pytest.approx(expected.item())


def test_predictions_are_averaged_over_mirror_images_and_shifts() -> None:
    seen: list[torch.Tensor] = []

    def predict(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return images[:, :2, 5, 7] ** 2  # one pixel of two channels, and nothing symmetric

    x = torch.randn(3, 3, 32, 32)
    pixel = {(i, j): x[:, :2, 5 + i, j] ** 2 for i in (-1, 0, 1) for j in range(32)}
    flip = (pixel[0, 7] + pixel[0, 24]) / 2
    # Shifted down and right a pixel shows its upper left neighbour; and so mirrored.
    shifts = [(pixel[-1, 6] + pixel[-1, 23]) / 2, (pixel[1, 8] + pixel[1, 25]) / 2]
    logits = predict_flipped(predict, x)
    assert torch.allclose(logits, flip / 2 + (shifts[0] + shifts[1]) / 4)
    assert [tuple(images.shape) for images in seen] == [(3, 3, 32, 32)] * 6
