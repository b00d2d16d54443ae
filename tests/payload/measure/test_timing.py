"""What is timed: no compilation, no wait of the host between operations, and enough work."""

import time
from types import SimpleNamespace

import pytest
import torch

from jobkit.checks.comm.bench import in_a_row
from jobkit.checks.comm.ops import Exchange, Team
from jobkit.payload.clock import Clock
from jobkit.payload.data.batches import Batches, DeviceData, Step
from jobkit.payload.data.cache import Dataset
from jobkit.payload.data.sources import synthetic
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.base import make_optimizer
from jobkit.payload.strategies.ddp import _empty_in_fp32
from jobkit.payload.strategies.single import Single
from jobkit.payload.train import Trainer
from jobkit.payload.warnings import too_short
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU

CPU = torch.device("cpu")
COMPILING_S, STEP_S = 0.3, 0.002


@pytest.mark.parametrize(("compiles", "images", "seconds"), [(True, 24, 0.0), (False, 27, 0.3)])
def test_compiling_for_the_last_batch_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, images: int, seconds: float
) -> None:
    """8 + 8 + 8 + 3 timed samples after two iterations of warm-up; the last 3 are another size."""
    spec, place = RunSpec(strategy="single", model="mlp", warmup_iterations=2), RankEnv()
    strategy = Single(spec, place, CPU)
    strategy.setup(build_model(spec, 10))
    train, test, classes = synthetic(43, 10)
    trainer = Trainer(
        spec=RunSpec(strategy="single", compile=compiles, warmup_iterations=2),
        group=SimpleNamespace(place=place, device=CPU),  # type: ignore[arg-type]
        data=DeviceData(Dataset(train, test, classes), CPU, seed=0, augmentation=None),
        batches=Batches(43, 8, 0, 1, 1, 0),
        strategy=strategy,
        optimizer=make_optimizer(strategy),
        report=SimpleNamespace(),  # type: ignore[arg-type]
        classes=10,
    )
    sizes: set[int] = set()
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step_and_compile(step: Step, epoch: int, clock: Clock) -> torch.Tensor:
        now[0] += STEP_S if step.global_count in sizes else COMPILING_S
        sizes.add(step.global_count)
        clock.images += step.global_count
        return torch.zeros(())

    monkeypatch.setattr(trainer, "_train_step", step_and_compile)
    clock, _, _ = trainer.train_epoch(0, lambda _: None)
    assert clock.images == images
    assert seconds <= clock.elapsed_s() < seconds + COMPILING_S
    again, _, _ = trainer.train_epoch(1, lambda _: None)
    assert again.images == 43  # no size is new


def test_operations_in_a_row_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in ("synchronise", "barrier"):
        monkeypatch.setattr(Team, name, lambda self, name=name: calls.append(name))
    monkeypatch.setattr(Team, "largest", lambda self, values: [2 * v for v in values])

    def run() -> None:
        calls.append("run")
        now[0] += 0.01

    made = Exchange(8, lambda: calls.append("prepare"), run, lambda: True)
    taken = in_a_row(made, Team((0, 1), 0, GPU), 5)
    assert calls == ["prepare", "synchronise", "barrier", *["run"] * 5, "synchronise"]
    assert taken == pytest.approx(0.02)  # of one, the maximum over the ranks


def test_an_empty_batch_meets_sync_batch_norm_in_fp32() -> None:
    norm = torch.nn.SyncBatchNorm(3)
    (empty,) = _empty_in_fp32(norm, (torch.zeros(0, 3, 4, 4, dtype=torch.bfloat16),))
    assert empty.dtype is torch.float32
    some = torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)
    assert _empty_in_fp32(norm, (some,))[0] is some


@pytest.mark.parametrize(
    ("seconds", "device", "told"), [(0.12, GPU, True), (1.0, GPU, False), (0.12, CPU, False)]
)
def test_an_epoch_that_is_too_short_is_told(
    seconds: float, device: torch.device, told: bool
) -> None:
    assert ("an epoch takes 0.12 s" in too_short(seconds, device)) is told
