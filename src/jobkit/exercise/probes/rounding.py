"""Probes of exercise 4.2: bf16 against fp32: bytes, time, and where the rounding shows."""

import statistics
import time

import torch
import torch.nn.functional as F

from jobkit.exercise.table import Table
from jobkit.payload.model import CNN
from jobkit.units import MIB

_BATCH, _STEPS = 8, 3
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _step(dtype: torch.dtype) -> tuple[float, float, float]:
    """A forward and backward pass: MiB of parameters, MiB kept for backward, ms."""
    torch.manual_seed(0)
    model = CNN(10).to(dtype)
    x, y = torch.randn(_BATCH, 3, 32, 32, dtype=dtype), torch.randint(10, (_BATCH,))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    times, kept = [], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(_STEPS):
        kept.clear()
        begun = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        times.append(1000 * (time.perf_counter() - begun))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return parameters / MIB, sum(kept.values()) / MIB, statistics.median(times)


def bytes_and_time() -> list[Table]:
    """The CNN in each precision."""
    rows = [(name, *_step(dtype)) for name, dtype in _DTYPES.items()]
    return [
        Table(
            f"the CNN, a batch of {_BATCH}, forward and backward (median of {_STEPS})",
            ("precision", "parameters (MiB)", "kept for backward (MiB)", "time (ms)"),
            rows,
        )
    ]


def _added(dtype: torch.dtype, sum_dtype: torch.dtype) -> list[object]:
    """A weight of 1 after 1,000 updates of 0.001; 4,096 gradients of 0.01 added up."""
    weight, update = torch.ones(1, dtype=dtype), torch.full((1,), 0.001, dtype=dtype)
    for _ in range(1000):
        weight += update
    total, gradient = torch.zeros(1, dtype=sum_dtype), torch.full((1,), 0.01, dtype=dtype)
    for _ in range(4096):
        total += gradient
    return [weight.item(), total.item()]


def sums() -> list[Table]:
    """What an update and a sum of gradients become in each precision."""
    rows = []
    for name, dtype in _DTYPES.items():
        one = torch.ones(1, dtype=dtype)
        gap = torch.nextafter(one, torch.full((1,), 2.0, dtype=dtype)) - one
        rows.append((name, name, gap.item(), *_added(dtype, dtype)))
    eps = torch.finfo(torch.bfloat16).eps
    rows.append(("bf16", "fp32", eps, *_added(torch.bfloat16, torch.float32)))
    return [
        Table(
            "where the rounding shows",
            ("precision", "sums in", "next number after 1, less 1", "1 + 1,000 times 0.001",
             "4,096 times 0.01"),
            rows,
        )
    ]  # fmt: skip
