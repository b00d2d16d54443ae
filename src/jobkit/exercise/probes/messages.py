"""Probe of exercise 4.3: the collectives of a training step, its time and what is held."""

import statistics
import time

import torch
from torch import nn

from jobkit.exercise.probes.counted import Counted
from jobkit.exercise.probes.sharding import (
    layers_of,
    only_new,
    replicated,
    sharded,
    storages,
)
from jobkit.exercise.ranks import on_ranks
from jobkit.exercise.table import Table
from jobkit.units import MIB

_STEPS, _BATCH = 7, 16
_WIDTHS = (32, 512)
_WAYS = {"DDP": 0, "FSDP, 1 group": 1, "FSDP, 8 groups": 8}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """One step; its time in ms."""
    begun = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return 1000 * (time.perf_counter() - begun)


def _measure(groups: int, width: int) -> tuple[float, ...]:
    only_new()
    model = layers_of(width)
    wrapped = sharded(model, groups, frees=True) if groups else replicated(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    x = torch.randn(_BATCH, width)
    _step(wrapped, optimizer, x)  # the first one makes the buffers
    times = [_step(wrapped, optimizer, x) for _ in range(_STEPS)]
    with Counted() as counted:
        _step(wrapped, optimizer, x)
    return counted.calls(), statistics.median(times), min(times), storages() / MIB


def _rows(rank: int) -> list[tuple[object, ...]]:
    """Each way for each width, one after the other."""
    return [
        (8 * width * width, name, *_measure(groups, width))
        for width in _WIDTHS
        for name, groups in _WAYS.items()
    ]


def per_step() -> list[Table]:
    """DDP and FSDP for a small and a larger model."""
    rows = on_ranks(_rows)[0]
    return [
        Table(
            f"a step of AdamW on two ranks: median and best of {_STEPS}",
            ("parameters", "strategy", "collectives", "median (ms)", "best (ms)",
             "held after it (MiB)"),
            rows,
        )
    ]  # fmt: skip
