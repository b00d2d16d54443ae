"""What the strategies send, and when: gradients are reduced once a step, however it is split."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from jobkit.payload.distributed import Group, Place
from jobkit.payload.model import build_model
from jobkit.payload.strategies import STRATEGIES, Strategy
from jobkit.payload.strategies.base import make_optimizer
from jobkit.spec import RunSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    group = Group(Place(), CPU, 60.0)
    yield
    group.close()


def made(name: str, **settings: Any) -> Strategy:
    spec = RunSpec(strategy=name, model="mlp", **settings)
    strategy = STRATEGIES[name](spec, Place(), CPU)
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
    def reductions(micro_batches: int) -> int:
        strategy = made("fsdp")
        with CommDebugMode() as counted:
            accumulate(strategy, micro_batches)
        counts = counted.get_comm_counts()
        return sum(n for op, n in counts.items() if "reduce_scatter" in str(op))

    assert reductions(3) == reductions(1) > 0


@pytest.mark.parametrize(("smallest", "blocks"), [(1000, 3), (300_000, 1), (10**7, 0)])
def test_the_wrapping_rule_of_fsdp(smallest: int, blocks: int) -> None:
    """The mlp's layers have 1,573,376, 131,328 and 2,570 parameters."""
    strategy = made("fsdp", fsdp_wrap_min_parameters=smallest)
    head, *lines, root = strategy.describe()
    assert head.startswith("fsdp: blocks")
    assert len(lines) == blocks
    assert root.startswith("  root: ")
    total = sum(int(line.split()[1].replace(",", "")) for line in [*lines, root])
    assert total == 1_707_274


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_clipped_step_and_the_fused_optimizer(name: str, optimizer: str) -> None:
    strategy = made(name, optimizer=optimizer, clip_norm=1e-3, lr=1.0, momentum=0.0)
    made_optimizer = make_optimizer(strategy)
    assert made_optimizer.defaults["fused"] is (name != "fsdp" or optimizer == "adamw")
    accumulate(strategy, 1)
    gradients = [p.grad for p in strategy.model.parameters() if p.grad is not None]
    strategy.optimizer_step(made_optimizer)
    assert gradients
    assert all(p.grad is None for p in strategy.model.parameters())


def test_an_empty_micro_batch_adds_nothing() -> None:
    strategy = made("single")
    loss = strategy.forward_backward(
        torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.int64), 1.0, last=True
    )
    assert loss == 0
    assert all(not p.grad.any() for p in strategy.model.parameters() if p.grad is not None)
