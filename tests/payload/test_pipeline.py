"""Pipelines: a model cut into stages computes what the model does, or it is said why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.blocks import filled_up
from jobkit.payload.strategies.local import Single
from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.payload.strategies.stages import check_owners, cut, logits_of
from jobkit.spec.runspec import RunSpec

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("alone")
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.zeros(3, dtype=torch.int64)


def run(stages: list[nn.Module], x: Any) -> Any:
    for stage in stages:
        x = stage(*(x if isinstance(x, tuple) else (x,)))
    return x


@pytest.mark.parametrize(("name", "count"), [("cnn", 1), ("cnn", 5), ("mlp", 3), ("resnet18", 4)])
def test_the_stages_together_are_the_model(name: str, count: int) -> None:
    model = build_model(RunSpec(model=name), 10)
    stages = cut(model, count)
    check_owners(model, stages)
    assert len(stages) == count
    logits = logits_of(stages, IMAGES)
    assert all(stage.training for stage in stages)
    model.eval()
    assert torch.equal(logits, model(IMAGES))
    assert torch.equal(run(stages, IMAGES), logits)


def test_layers_are_shared_out_evenly() -> None:
    model = build_model(RunSpec(), 10)
    first, _ = cut(model, 2)
    assert {name.split(".")[0] for name, _ in first.named_parameters()} == {"stage1", "stage2"}
    skip = Net(skips)  # a skip to the next stage is sent
    assert torch.equal(run(cut(skip, 2), IMAGES), skip(IMAGES))


class Net(nn.Module):
    """Three layers, which are called as the function says, and one that is not."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.unused, self.function = nn.Linear(2, 2), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def skips(net: Any, x: Tensor) -> Tensor:
    first = net.a(x)
    return net.c(net.b(first)) + first


def counts(net: Any, x: Tensor) -> Tensor:
    count = x.shape[0]
    return net.c(net.b(net.a(x))).reshape(count, -1)


PLAIN = lambda net, x: net.c(net.b(net.a(x)))  # noqa: E731
BRANCHES = lambda net, x: net.b(net.a(x)) if x.sum() > 0 else net.c(x)  # noqa: E731
SHARES = lambda net, x: net.a(net.b(net.a(x)))  # noqa: E731


@pytest.mark.parametrize(
    ("forward", "count", "line"),
    [
        (PLAIN, 4, "4 pipeline stages are more than the model's 3 layers"),
        (skips, 3, "stage 2 needs 'a' of stage 0"),
        (BRANCHES, 2, "its forward pass cannot be traced .symbolically"),
        (counts, 2, "stage 1 needs a int, and only tensors can be sent"),
        (PLAIN, 2, "parameter 'unused.weight' is used by no stage"),
        (SHARES, 2, "parameter 'a.weight' is shared by stages .0, 1."),
    ],
)
def test_a_model_that_cannot_be_cut(forward: Any, count: int, line: str) -> None:
    model = Net(forward)
    with pytest.raises(UsageError, match=line):
        stages = cut(model, count)
        logits_of(stages, IMAGES)
        check_owners(model, stages)


@pytest.mark.parametrize(
    ("ranks", "settings", "microbatches"),
    [
        (3, {}, 4),  # the fewest that keep three stages busy and divide 512
        (4, {"pipeline_stages": 2, "global_batch_size": 12, "accumulate": 2}, 3),
        (2, {"microbatches": 8}, 8),
        (4, {"microbatches": 2, "pipeline_schedule": "gpipe"}, 2),
    ],
)
def test_the_number_of_microbatches(ranks, settings, microbatches) -> None:
    place = RankEnv(world_size=ranks, local_world_size=ranks)
    spec = RunSpec(strategy="pp", ranks_per_node=ranks, **settings)
    assert Pipeline(spec, place, CPU).microbatches == microbatches


@pytest.mark.parametrize(
    ("kind", "settings"), [(Single, {}), (Pipeline, {"microbatches": 2, "global_batch_size": 8})]
)
def test_a_rank_with_no_samples_keeps_running_statistics(kind, settings) -> None:
    name = "pp" if kind is Pipeline else "single"
    strategy = kind(RunSpec(strategy=name, **settings), RankEnv(), CPU)
    norm = nn.BatchNorm2d(3)
    strategy.setup(nn.Sequential(norm, nn.Flatten(), nn.Linear(3072, 10)))
    before = [buffer.clone() for buffer in norm.buffers()]
    strategy.forward_backward(IMAGES[:0], LABELS[:0], 1.0, True)
    assert all(map(torch.equal, norm.buffers(), before))
    gradients = [p.grad for p in strategy.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)  # it took part all the same
    strategy.forward_backward(IMAGES, LABELS, 1.0, True)
    assert norm.num_batches_tracked > 0


@pytest.mark.parametrize(
    ("count", "parts", "order"),
    [(3, 2, [0, 1, 2, 0]), (1, 4, [0, 0, 0, 0]), (2, 2, [0, 1]), (2, 5, [0, 1, 0, 1, 0])],
)
def test_samples_are_taken_again_in_their_order(count: int, parts: int, order: list[int]) -> None:
    assert torch.equal(filled_up(IMAGES[:count], parts), IMAGES[order])
    assert torch.equal(filled_up(IMAGES[:0], 3), torch.zeros(3, 3, 32, 32))
