"""Who gets which samples, how they are augmented, and that a GPU waits for none of it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from jobkit.data.images import synthetic
from jobkit.errors import UsageError
from jobkit.payload.batches import (
    PADDING,
    Batches,
    DeviceData,
    alternating_flips,
    augment,
    sample_hash,
)
from jobkit.payload.data import load_data, split
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.local import Single
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU, Operations


@pytest.mark.parametrize(
    ("samples", "batch", "world", "accumulate"),
    [(250, 64, 8, 3), (512, 128, 2, 1), (5, 100, 8, 1), (9, 4, 1, 3)],
)
def test_every_sample_is_seen_once_as_on_one_rank(samples, batch, world, accumulate) -> None:
    ranks = [list(Batches(samples, batch, r, world, accumulate, 5).epoch(1)) for r in range(world)]
    alone = list(Batches(samples, batch, 0, 1, 1, 5).epoch(1))
    assert len(alone) == len(Batches(samples, batch, 0, 1, 1, 5)) == -(-samples // batch)
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        together = torch.cat([m for part in parts for m in part.micro_batches])
        assert together.tolist() == step.micro_batches[0].tolist()
        assert {p.global_count for p in parts} == {len(together)}
        assert {len(p.micro_batches) for p in parts} == {accumulate}
        sizes = [sum(map(len, p.micro_batches)) for p in parts]
        assert max(sizes) - min(sizes) <= 1
    seen = torch.cat([s.micro_batches[0] for s in alone])
    assert sorted(seen.tolist()) == list(range(samples))


def test_the_order_changes_with_epoch_and_seed_only() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        (step,) = Batches(64, 64, 0, 1, 1, seed).epoch(epoch)
        return step.micro_batches[0].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(e, s)) for e in range(3) for s in range(3)}) == 9


def test_the_samples_to_test_with_are_also_of_a_part_that_is_split_off() -> None:
    spec = RunSpec(dataset="synthetic", train_samples=100, test_samples=7, train_split=0.8)
    data = load_data(spec, SimpleNamespace(place=RankEnv()), print, dry_run=True)  # type: ignore[arg-type]
    assert (len(data.train.labels), len(data.test.labels)) == (80, 7)


@pytest.mark.parametrize(("padding", "reflect"), [(PADDING, False), (2, True)])
def test_augmentation_is_the_plain_pad_crop_and_flip(padding: int, reflect: bool) -> None:
    images = torch.randint(0, 256, (50, 32, 32, 3), dtype=torch.uint8)
    bits, span = sample_hash(3, 2, torch.arange(50)), 2 * padding + 1
    flips = bits // span**2 % 2
    found = augment(images, bits, flips, padding, reflect)
    for image, bit, flip, got in zip(images, bits.tolist(), flips, found, strict=True):
        source = image.flip(1) if flip else image
        planes, border = source.permute(2, 0, 1).float(), (padding,) * 4
        plain = F.pad(planes, border, mode="reflect" if reflect else "constant")
        padded = plain.to(torch.uint8).permute(1, 2, 0)
        top, left = bit % span, bit // span % span
        assert torch.equal(got, padded[top : top + 32, left : left + 32].permute(2, 0, 1))


def test_crops_and_flips_are_spread_evenly_and_alternate_in_the_speed_run() -> None:
    samples, span = torch.arange(81_000), 2 * PADDING + 1
    bits = sample_hash(0, 0, samples)
    flips = [alternating_flips(0, epoch, samples) for epoch in range(3)]
    assert torch.equal(flips[0] + flips[1], torch.ones_like(samples))  # both ways in two epochs
    assert torch.equal(flips[0], flips[2])
    other = (alternating_flips(1, 0, samples) == flips[0]).long()
    crops = (bits % span, 9), (bits // span % span, 9), (bits // span**2 % 2, 2)
    for values, size in (*crops, (flips[0], 2), (other, 2)):
        counts = torch.bincount(values, minlength=size) / len(bits) * size
        assert (counts - 1).abs().max() < 0.05
    assert bits.min() >= 0
    assert len(bits.unique()) == len(bits)


def test_a_split_of_the_training_samples_takes_the_place_of_the_test_samples() -> None:
    whole = synthetic(60, 10)
    found = split(whole, 0.8)
    assert (len(found.train.labels), len(found.test.labels)) == (48, 12)
    both = torch.cat([found.train.images, found.test.images]).flatten(1).tolist()
    assert sorted(both) == sorted(whole.train.images.flatten(1).tolist())
    assert torch.equal(split(whole, 0.8).test.images, found.test.images)
    assert split(whole, None) is whole
    with pytest.raises(UsageError, match="leaves one part of 60 samples empty"):
        split(whole, 0.001)


@pytest.mark.parametrize(
    ("augmented", "speed_run", "channels_last"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_sample_looks_the_same_in_whatever_batch(augmented, speed_run, channels_last) -> None:
    source = synthetic(60, 10)
    spec = RunSpec(seed=4, augment=augmented, speed_run=speed_run, channels_last=channels_last)
    data = DeviceData(source, CPU, spec)
    everything = torch.randperm(60)
    whole, labels = data.training_batch(everything, epoch=2)
    parts = [data.training_batch(p, epoch=2)[0] for p in everything.split(17)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(labels, source.train.labels[everything])
    if speed_run:  # as published: borders of two pixels, reflected
        bits, flips = sample_hash(4, 2, everything), alternating_flips(4, 2, everything)
        plain = augment(source.train.images[everything], bits, flips, 2, True)
        assert torch.equal(data._crop(everything, 2)[0], plain)
    other, _ = data.training_batch(everything, epoch=3)
    assert torch.equal(whole, other) is not augmented
    form = torch.channels_last if channels_last else torch.contiguous_format
    assert whole.is_contiguous(memory_format=form)
    images, labels = data.test_batch(slice(5, 9))  # plain, and normalised
    mean, std = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])
    expected = ((source.test.images[5:9].float() - mean) / std).permute(0, 3, 1, 2)
    assert torch.allclose(images, expected, atol=1e-5)
    assert torch.equal(labels, source.test.labels[5:9])


BATCH, CPU = 512, torch.device("cpu")


def data_on(device: torch.device, samples: int) -> DeviceData:
    return DeviceData(synthetic(samples, 10), device, RunSpec(seed=4))


def test_no_step_has_the_host_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, how = 5 * BATCH + 7, {"dataset": "synthetic", "global_batch_size": BATCH}
    spec = RunSpec(strategy="single", accumulate=2, device="cuda", **how)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    # Tensors made inside have shapes, types and a device, and no data.
    with FakeTensorMode(allow_non_fake_inputs=True):
        strategy = Single(spec, RankEnv(), GPU)
        with GPU:  # fake parameters cannot be moved
            strategy.model = build_model(spec, 10)
        trainer = Trainer(
            spec=spec,
            group=SimpleNamespace(place=RankEnv(), device=GPU),  # type: ignore[arg-type]
            data=data_on(GPU, samples),
            batches=Batches(samples, BATCH, 0, 1, spec.accumulate, 0),
            strategy=strategy,
            optimizer=strategy.make_optimizer(),
            report=SimpleNamespace(),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(strategy, "optimizer_step", lambda optimizer: None)
        with Operations() as seen:
            for step in trainer.data.cropped_ahead(trainer.batches.epoch(0, 0, GPU), 0):
                trainer.loss_sum += trainer._train_step(step, 0)
    assert seen.waits == [f"_to_copy.default({samples},)"]  # the order, once
    assert "convolution" in seen.names  # the forward pass was in it


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 3)])
def test_crops_made_ahead_are_those_of_each_batch(rank: int, ranks: int) -> None:
    data = data_on(CPU, 2000)
    steps = list(Batches(2000, 64, rank, ranks, 3, 0).epoch(1, 128))
    # A CPU crops batch by batch.
    assert all(step.crops[0] is None for step in data.cropped_ahead(steps, 1))
    data.crops_ahead = True
    ahead = list(data.cropped_ahead(steps, 1))
    assert len(ahead) == len(steps) == -(-(2000 - 128) // 64)
    for step, plain in zip(ahead, steps, strict=True):
        assert step.global_count == plain.global_count
        for j, indices in enumerate(plain.micro_batches):
            assert step.crops[j] is not None  # else a batch takes some 40 operations of a GPU
            made, labels = data.training_batch(step.micro_batches[j], 1, step.crops[j])
            images, expected = data.training_batch(indices, 1)
            assert torch.equal(made, images) and torch.equal(labels, expected)
            assert made.stride() == images.stride()
