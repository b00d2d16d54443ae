"""FSDP's shard groups: what each step sends, and that the grouping changes no result."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.fsdp import FSDP
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from support.fake_cuda import Operations

CPU = torch.device("cpu")
SENDS = ("allgather", "reduce_scatter")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives send nothing (torch's fake process group)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Normalised(nn.Sequential):
    """Five blocks of about 0.1 MiB, three with a batch normalisation."""

    def __init__(self) -> None:
        layers = [nn.Linear(3072, 9), *(nn.Linear(9, 2700) for _ in range(2))]
        blocks = [nn.Sequential(each, nn.BatchNorm1d(each.out_features)) for each in layers]
        narrow = nn.Linear(2700, 9)
        super().__init__(nn.Flatten(), *blocks[:2], narrow, blocks[2], nn.Linear(2700, 10))


def step_of(module: nn.Module, **settings: Any) -> tuple[FSDP, Counter[str]]:
    """A strategy of two ranks over a model, and the collectives of its second step, by name."""
    spec = RunSpec(strategy="fsdp", ranks_per_node=2, **settings)
    strategy = FSDP(spec, RankEnv(world_size=2, local_world_size=2), CPU)
    strategy.setup(module)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for _ in range(2):
        with Operations() as seen:
            strategy.forward_backward(images, labels, 0.5, last=True)
        strategy.model.zero_grad()
    # Copies into and out of the buffers send nothing.
    sent = (word for name in seen.names for word in SENDS if word in name and "copy" not in name)
    return strategy, Counter(sent)


@pytest.mark.parametrize(
    ("settings", "gathers", "reductions"),
    [
        ({}, 1, 1),  # one group
        ({"fsdp_group_mib": 0.0}, 9, 5),  # three stages and hidden twice; the last layer stays
        ({"fsdp_group_mib": 0.25}, 3, 2),
        ({"fsdp_group_mib": 0.05}, 5, 3),
        ({"fsdp_group_mib": 0.0, "fsdp_reshard_after_forward": False}, 5, 5),
    ],
)
def test_a_step_waits_as_often_as_is_said(two_ranks, settings, gathers, reductions) -> None:
    spec = RunSpec(strategy="fsdp", model="cnn", ranks_per_node=2, **settings)
    strategy, sent = step_of(build_model(spec, 10), model="cnn", **settings)
    assert sent == {"allgather": gathers, "reduce_scatter": reductions}
    size = strategy.size_of(build_model(spec, 10))
    said = FACTS["fsdp"].messages(spec.to_dict(), size)
    assert said is not None
    assert sum(m.count for m in said if m.scope.ranks > 1) == gathers + reductions


@pytest.mark.parametrize("checkpointing", [False, True])
def test_batch_normalisation_in_low_precision_is_one_group(two_ranks, checkpointing) -> None:
    given = {"precision": "bf16", "fsdp_group_mib": 0.15, "activation_checkpointing": checkpointing}
    strategy, sent = step_of(Normalised(), **given)
    assert [group.exact for group in strategy.groups] == [True, False, False, False]
    assert all(p.dtype == torch.float32 for p in strategy.model.parameters())
    # The two blocks, one of them again, and all normalisations at once.
    assert sent == {"allgather": 4, "reduce_scatter": 3}


def test_a_list_of_modules_is_no_block_but_its_elements_are(two_ranks: None) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3072, 30), nn.Linear(30, 10)])
    model.forward = lambda x: model.layers[1](model.layers[0](x.flatten(1)))
    strategy, _ = step_of(model, fsdp_group_mib=0.0)
    assert [g.parameters for g in strategy.groups if g.parameters] == [310, 92_190]
