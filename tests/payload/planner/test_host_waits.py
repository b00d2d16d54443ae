"""What advise says of settings that have the host wait for the GPU, or tensors copied."""

from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from jobkit.planner.costs import costs
from jobkit.planner.footprints import Subject
from jobkit.spec.runspec import RunSpec


def found(parameters: int | None = None, **settings: Any) -> list[str]:
    spec = RunSpec(**{"strategy": "ddp", "ranks_per_node": 2, "nodes": 1, **settings})
    return [text.split(":")[0] for text in costs(spec, Subject(parameters=parameters))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"ddp_comm_hook": "powersgd"}, ["--ddp-comm-hook powersgd"]),
        ({"precision": "fp16"}, []),  # fused
        ({"strategy": "fsdp", "precision": "fp16"}, ["--precision fp16"]),
        ({"strategy": "fsdp", "precision": "fp16", "optimizer": "adamw"}, []),
        ({"strategy": "fsdp", "precision": "bf16"}, []),
        ({"model": "resnet18"}, ["channels-last"]),
        ({"model": "resnet18", "channels_last": False}, []),
        ({"model": "resnet18", "strategy": "fsdp"}, []),
        ({"model": "resnet18", "parameters": 1000}, []),  # the size alone is known
    ],
)
def test_each_is_named_where_it_holds(settings: dict[str, Any], expected: list[str]) -> None:
    assert found(**settings) == expected


def test_torch_still_waits_in_its_hook() -> None:
    with open(powerSGD_hook.__file__) as source:  # noqa: PTH123
        assert "torch.cuda.synchronize(device)" in source.read()
