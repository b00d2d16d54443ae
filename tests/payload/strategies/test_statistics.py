"""Made-up samples leave no trace in the running statistics of batch normalisation."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.base import Strategy
from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.payload.strategies.single import Single
from jobkit.payload.strategies.statistics import filled_up
from jobkit.spec.runspec import RunSpec

CPU = torch.device("cpu")
IMAGES = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)) + 3.0
LABELS = torch.zeros(5, dtype=torch.int64)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(kind: type[Strategy], spec: RunSpec) -> tuple[Strategy, nn.BatchNorm2d]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 10),
    )  # fmt: skip
    strategy = kind(spec, RankEnv(), CPU)
    strategy.setup(model)
    (norm,) = (m for m in strategy.model.modules() if isinstance(m, nn.BatchNorm2d))
    return strategy, norm


def statistics(norm: nn.BatchNorm2d) -> list[Tensor]:
    return [buffer.clone() for buffer in norm.buffers()]


def pipeline(microbatches: int) -> tuple[Strategy, nn.BatchNorm2d]:
    spec = RunSpec(strategy="pp", microbatches=microbatches, global_batch_size=8)
    return made(Pipeline, spec)


@pytest.mark.parametrize("kind", ["single", "pp"])
def test_a_rank_with_no_samples_keeps_them(kind: str) -> None:
    strategy, norm = pipeline(2) if kind == "pp" else made(Single, RunSpec(strategy="single"))
    before = statistics(norm)
    strategy.forward_backward(IMAGES[:0], LABELS[:0], 1.0, True)
    assert all(map(torch.equal, statistics(norm), before))
    gradients = [p.grad for p in strategy.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)  # it took part all the same
    strategy.forward_backward(IMAGES, LABELS, 1.0, True)
    assert norm.num_batches_tracked > 0


def test_a_smaller_batch_of_a_pipeline_is_filled_up_with_its_own_samples() -> None:
    """5 samples in 4 microbatches of 2: all are near the mean of the real ones."""
    strategy, norm = pipeline(4)
    norm.momentum = None  # the mean over all microbatches
    strategy.forward_backward(IMAGES, LABELS, 0.2, True)
    alone, reference = made(Single, RunSpec(strategy="single"))
    reference.momentum = None
    alone.forward_backward(IMAGES, LABELS, 0.2, True)
    assert torch.allclose(norm.running_mean, reference.running_mean, rtol=0.02)


@pytest.mark.parametrize(
    ("count", "parts", "order"),
    [(5, 4, [0, 1, 2, 3, 4, 0, 1, 2]), (1, 4, [0, 0, 0, 0]), (4, 4, [0, 1, 2, 3])],
)
def test_samples_are_taken_again_in_their_order(count: int, parts: int, order: list[int]) -> None:
    assert torch.equal(filled_up(IMAGES[:count], parts), IMAGES[order])


def test_where_there_is_no_sample_blank_ones_are_made() -> None:
    assert torch.equal(filled_up(IMAGES[:0], 3), torch.zeros(3, 3, 32, 32))
