"""What a rank keeps in memory from step to step: predicted from shapes, and measured on tensors.

Kept are parameters, gradients, optimizer state and buffers. Activations and what is on its way
between ranks come and go: memory_plans.py adds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from jobkit.spec.runspec import RunSpec

MIB, GIB = 2**20, 2**30
_STEP_BYTES = 4  # AdamW counts its steps in a float for each parameter


@dataclass(frozen=True, kw_only=True)
class Share:
    """Bytes that one rank keeps."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    def describe(self) -> str:
        """The parts in bytes, for a log."""
        return (
            f"{self.total:,} bytes: parameters {self.parameters:,}, gradients {self.gradients:,}, "
            f"optimizer {self.optimizer:,}, buffers {self.buffers:,}"
        )


def persistent(
    spec: RunSpec, parameters: Iterable[Tensor], buffers: Iterable[Tensor], rank: int = 0
) -> Share:
    """What a rank will keep, from the shapes alone; gradients are those just before they are freed.

    parameters and buffers: of the whole model, or under pp and mp of the rank's stages. A sharded
    parameter counts by its whole shape; fake and meta tensors will do.

    SGD keeps one number for each parameter (none without momentum), AdamW two. FSDP2 pads each
    shard to that of the first rank, also in the gradients; the optimizer's state has no padding.
    """
    every = list(parameters)
    trained = [p for p in every if p.requires_grad]
    kept, gradients = _bytes(every), _bytes(trained)
    with_state = [_bytes([p]) for p in trained]
    if spec.strategy == "fsdp":
        ranks = spec.world_size // spec.fsdp_hybrid_replicas
        kept = sum(_shard_bytes(p, ranks, 0) for p in every)
        gradients = sum(_shard_bytes(p, ranks, 0) for p in trained)
        with_state = [_shard_bytes(p, ranks, rank % ranks) for p in trained]
    elif spec.strategy == "ddp" and spec.zero1:
        with_state = [_bytes([p]) for p in zero1_parts(trained, spec.world_size)[rank]]
    return Share(
        parameters=kept,
        gradients=gradients,
        optimizer=_state_bytes(spec, with_state),
        buffers=_bytes(buffers),
    )


def zero1_parts(parameters: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """Whose state each rank has: the largest parameter first, to the rank that has least so far.

    This is the rule of torch's ZeroRedundancyOptimizer.
    """
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return parts


def fullest_of_zero1(parameters: Sequence[Tensor], ranks: int) -> int:
    """The rank that keeps most under ZeRO-1."""
    parts = zero1_parts([p for p in parameters if p.requires_grad], ranks)
    return max(range(ranks), key=lambda rank: _bytes(parts[rank]))


def _state_bytes(spec: RunSpec, with_state: Sequence[int]) -> int:
    """The optimizer's state for parameters of so many bytes here."""
    if spec.optimizer == "adamw":
        return 2 * sum(with_state) + _STEP_BYTES * len(with_state)
    return sum(with_state) if spec.momentum > 0 else 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _shard_bytes(parameter: Tensor, ranks: int, rank: int) -> int:
    """A rank's rows of a parameter, cut along the first dimension as torch.chunk does."""
    rows = parameter.shape[0] if parameter.dim() else 1
    most = -(-rows // ranks)
    here = min(max(rows - rank * most, 0), most)
    return here * _bytes([parameter]) // max(rows, 1)


def held(model: nn.Module, optimizer: Optimizer) -> Share:
    """What a rank's tensors really take, each storage once. Call it while gradients are there."""
    seen: set[int] = set()

    def storages(tensors: Iterable[object]) -> int:
        total = 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    with torch.no_grad():
        parameters = list(model.parameters())
        # ZeroRedundancyOptimizer has the optimizer of this rank's part inside.
        states = getattr(optimizer, "optim", optimizer).state.values()
        return Share(
            parameters=storages(parameters),
            gradients=storages(p.grad for p in parameters),
            optimizer=storages(value for state in states for value in state.values()),
            buffers=storages(model.buffers()),
        )
