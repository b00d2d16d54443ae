"""What the strategies send, and when: gradients are reduced once a step, however it is split."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from jobkit.payload.distributed import Group, RankEnv
from jobkit.payload.model import build_model
from jobkit.payload.strategies import Strategy, strategy_class
from jobkit.payload.strategies.base import make_optimizer
from jobkit.spec.runspec import RunSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    group = Group(RankEnv(), CPU, 60.0)
    yield
    group.close()


def made(name: str, **settings: Any) -> Strategy:
    spec = RunSpec(strategy=name, model="mlp", **settings)
    strategy = strategy_class(name)(spec, RankEnv(), CPU)
    strategy.setup(build_model(spec, 10))
    return strategy


def accumulate(strategy: Strategy, micro_batches: int) -> None:
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for j in range(micro_batches):
        strategy.forward_backward(images, labels, 0.25, last=j == micro_batches - 1)


def test_ddp_reduces_in_the_last_micro_batch_only() -> None:
    strategy, calls = made("ddp"), []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.is_last())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    strategy.model.register_comm_hook(None, hook)  # type: ignore[operator]
    accumulate(strategy, 1)
    in_one, calls[:] = list(calls), []
    accumulate(strategy, 3)
    assert in_one
    assert calls.count(True) == 1


def test_fsdp_reduces_in_the_last_micro_batch_only() -> None:
    strategy = made("fsdp")
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for last in (False, False, True):
        strategy.forward_backward(images, labels, 0.25, last)
        # A shard has its gradient once it has been reduced.
        assert all((p.grad is not None) is last for p in strategy.model.parameters())


@pytest.mark.parametrize(
    ("smallest", "group", "blocks"),
    [
        *((1000, 0.0, 3), (300_000, 0.0, 1), (10**7, 0.0, 0)),
        # 6.0, 0.5 and 0.01 MiB: what is too small joins its neighbour, and one group is the root's.
        *((1000, 0.4, 2), (1000, 0.01, 2), (1000, 0.001, 3), (1000, 4.0, 0), (10**7, 0.001, 0)),
    ],
)
def test_the_wrapping_rule_of_fsdp(smallest: int, group: float, blocks: int) -> None:
    """The mlp's layers have 1,573,376, 131,328 and 2,570 parameters."""
    strategy = made("fsdp", fsdp_wrap_min_parameters=smallest, fsdp_group_mib=group)
    head, *lines, root = strategy.describe()
    assert head.startswith("fsdp: shard groups")
    assert len(lines) == blocks
    assert root.startswith("  root: ")
    total = sum(int(line.split(": ")[1].split()[0].replace(",", "")) for line in [*lines, root])
    assert total == 1_707_274


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_clipped_step_is_as_long_as_the_clip(name: str) -> None:
    strategy = made(name, clip_norm=1e-2, lr=1.0, momentum=0.0, weight_decay=0.0)
    before = [full(p) for p in strategy.model.parameters()]
    accumulate(strategy, 1)
    strategy.optimizer_step(make_optimizer(strategy))
    moved = [full(p) - b for p, b in zip(strategy.model.parameters(), before, strict=True)]
    assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(1e-2, rel=1e-3)
    assert all(p.grad is None for p in strategy.model.parameters())


def full(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, all of its shards together."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_optimizer_is_fused_where_torch_has_that(name: str, optimizer: str) -> None:
    strategy = made(name, optimizer=optimizer)
    fused = make_optimizer(strategy).defaults["fused"]
    assert fused is (name != "fsdp" or optimizer != "sgd")


def test_an_empty_micro_batch_adds_nothing() -> None:
    strategy = made("single")
    loss = strategy.forward_backward(
        torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.int64), 1.0, last=True
    )
    assert loss == 0
    assert all(not p.grad.any() for p in strategy.model.parameters() if p.grad is not None)
