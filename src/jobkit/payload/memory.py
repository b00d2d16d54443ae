"""What a rank keeps in memory from step to step: the parts of a prediction, and what tensors hold.

Kept are parameters, gradients, optimizer state and buffers: Strategy.persistent predicts them.
Activations and communication buffers come and go: planner/footprints.py adds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jobkit.payload.sharded import is_sharded
from jobkit.spec.runspec import RunSpec

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


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """One stage's forward pass over one batch, in bytes. A model that is not cut is one stage."""

    saved: int  # for the backward pass, the stage's input left out
    taken: int  # its input
    given: int  # its output


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """What activations and communication buffers of one rank follow from."""

    share: Share  # what the rank keeps
    parameters: int  # number, of the whole model
    model: nn.Module | None  # None: only the number of parameters is known
    passed: Sequence[StagePass]  # of all stages of the model
    rank: int = 0
    devices: int = 1  # of dp


def state_bytes(spec: RunSpec, with_state: Sequence[int]) -> int:
    """The optimizer's state for parameters of these sizes: SGD keeps one number each, Adam two.

    Lookahead keeps its slow weights beside them.
    """
    slow = sum(with_state) if spec.lookahead_every else 0
    if spec.optimizer != "sgd":
        return 2 * sum(with_state) + _STEP_BYTES * len(with_state) + slow
    return (sum(with_state) if spec.momentum > 0 else 0) + slow


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of whole tensors; fake and meta tensors will do."""
    return sum(t.numel() * t.element_size() for t in tensors)


def shard_bytes(parameter: Tensor, ranks: int, rank: int) -> int:
    """A rank's rows of a parameter, split along the first dimension as torch.chunk does."""
    rows = parameter.shape[0] if parameter.dim() else 1
    most = -(-rows // ranks)
    here = min(max(rows - rank * most, 0), most)
    return here * bytes_of([parameter]) // max(rows, 1)


def held(model: nn.Module, optimizer: Optimizer) -> Share:
    """Bytes that a rank's tensors hold, each storage once. Call it while gradients are there."""
    seen: set[int] = set()

    def storages(tensors: Iterable[object]) -> int:
        total = 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            local = tensor.to_local() if is_sharded(tensor) else tensor
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
