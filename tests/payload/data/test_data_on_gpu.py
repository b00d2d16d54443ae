"""The data of a step on a GPU: no wait of the host, few operations, the same images."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from jobkit.payload.data.batches import (
    AHEAD_BATCHES,
    Augmentation,
    Batches,
    DeviceData,
    Step,
    data_bytes,
)
from jobkit.payload.data.cache import Dataset
from jobkit.payload.data.sources import synthetic
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.base import make_optimizer
from jobkit.payload.strategies.single import Single
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU, Operations, fake_gpu

BATCH = 512
SPEC = RunSpec(
    strategy="single", dataset="synthetic", global_batch_size=BATCH, accumulate=2, device="cuda"
)


def data_on(device: torch.device, samples: int) -> DeviceData:
    train, test, classes = synthetic(samples, 10)
    return DeviceData(Dataset(train, test, classes), device, seed=4, augmentation=Augmentation())


def trainer_on(device: torch.device, samples: int) -> Trainer:
    place = RankEnv()
    strategy = Single(SPEC, place, device)
    with device:  # fake parameters cannot be moved
        strategy.model = build_model(SPEC, 10)
    return Trainer(
        spec=SPEC,
        group=SimpleNamespace(place=place, device=device),  # type: ignore[arg-type]
        data=data_on(device, samples),
        batches=Batches(samples, BATCH, 0, 1, SPEC.accumulate, 0),
        strategy=strategy,
        optimizer=make_optimizer(strategy),
        report=SimpleNamespace(),  # type: ignore[arg-type]
        classes=10,
    )


def test_the_rig_sees_a_copy_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch), Operations() as seen:
        torch.zeros(7).to(GPU)
        torch.zeros(3, device=GPU).copy_(torch.zeros(3))
        torch.zeros(7).to(GPU, non_blocking=True)
        torch.zeros(3, device=GPU).copy_(torch.zeros(3), non_blocking=True)
    assert seen.waits == ["_to_copy.default(7,)", "copy_.default(3,)"]


def test_no_step_has_the_host_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        trainer = trainer_on(GPU, 5 * BATCH + 7)
        monkeypatch.setattr(trainer.strategy, "optimizer_step", lambda optimizer: None)
        steps = trainer.batches.epoch(0, 0, GPU)
        with Operations() as seen:
            ahead = trainer.data.cropped_ahead(steps, 0)
            first = next(ahead)
            assert seen.waits == [f"_to_copy.default({5 * BATCH + 7},)"]  # the order, once
            for step in (first, *ahead):
                trainer.loss_sum += trainer._train_step(step, 0, trainer.clock)
    assert seen.waits == [f"_to_copy.default({5 * BATCH + 7},)"]
    assert "convolution" in seen.names  # the forward pass was in it
    assert trainer.clock.images == 5 * BATCH + 7


def test_a_batch_takes_ten_operations_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * AHEAD_BATCHES
    with fake_gpu(monkeypatch):
        data = data_on(GPU, count * BATCH)
        steps = list(Batches(count * BATCH, BATCH, 0, 1, 1, 0).epoch(0, 0, GPU))
        with Operations() as seen:
            for step in data.cropped_ahead(steps, 0):
                data.training_batch(step.micro_batches[0], 0, step.crops_of(0))
        each = len(seen.names) / count
        with Operations() as alone:
            data.training_batch(steps[0].micro_batches[0], 0)
    assert each <= 10, each
    assert len(alone.names) > 3 * each  # what it would be, batch by batch


def steps_of(data: DeviceData, rank: int, ranks: int) -> list[Step]:
    return list(Batches(2000, 64, rank, ranks, 3, 0).epoch(1, 128, data.device))


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 3)])
def test_crops_made_ahead_are_those_of_each_batch(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int
) -> None:
    data = data_on(torch.device("cpu"), 2000)
    steps = steps_of(data, rank, ranks)
    monkeypatch.setattr(data, "device", torch.device("meta"))  # any that is no CPU
    ahead = list(data.cropped_ahead(steps, 1))
    monkeypatch.setattr(data, "device", torch.device("cpu"))
    assert len(ahead) == len(steps) == -(-(2000 - 128) // 64)
    for step, plain in zip(ahead, steps, strict=True):
        assert step.global_count == plain.global_count
        for j, indices in enumerate(plain.micro_batches):
            made, labels = data.training_batch(step.micro_batches[j], 1, step.crops_of(j))
            images, expected = data.training_batch(indices, 1)
            assert torch.equal(made, images)
            assert torch.equal(labels, expected)
            assert made.stride() == images.stride()


def test_a_cpu_crops_batch_by_batch() -> None:
    data = data_on(torch.device("cpu"), 2000)
    assert all(step.crops_of(0) is None for step in data.cropped_ahead(steps_of(data, 0, 1), 1))


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        live = (size for ref, size in self.storages.values() if not ref.expired())
        self.peak = max(self.peak, sum(live))
        return made


def test_the_memory_of_crops_is_at_most_the_predicted() -> None:
    data = data_on(torch.device("cpu"), 600)
    indices = torch.arange(AHEAD_BATCHES * 512) % 600
    with Live() as live:
        data._crop(indices, 0)
    kept = len(indices) * (32 * 32 * 3 + 8)  # of the steps before
    predicted = data_bytes(0, 512)
    assert 0.8 * predicted < live.peak + kept <= predicted
