"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered block by block.

The wrapping rule: each direct child of the model with at least --fsdp-wrap-min-parameters
parameters is a block of its own, and what is left belongs to the root.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from jobkit.payload.strategies.base import Strategy


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    name = "fsdp"

    def wrap(self, model: nn.Module) -> nn.Module:
        # Parameters stay contiguous: fully_shard refuses other memory formats. The input is
        # channels last all the same, which is what the convolutions go by.
        spec = self.spec
        # On the CPU there is nothing to offload to, and no memory to pin.
        offloads = spec.fsdp_cpu_offload and self.device.type == "cuda"
        if not offloads:
            model.to(self.device)
        low = spec.precision != "fp32"
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32 if low and spec.fsdp_reduce_fp32 else None,
        )
        offload = CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy()
        self.lines = ["fsdp: blocks, parameters in all, and on this rank"]
        blocks = [
            (name, child)
            for name, child in model.named_children()
            if parameters_of(child) >= spec.fsdp_wrap_min_parameters
        ]
        total = parameters_of(model)
        inside = sum(parameters_of(child) for _, child in blocks)
        for _, module in [*blocks, ("root", model)]:
            fully_shard(
                module,
                mp_policy=policy,
                reshard_after_forward=spec.fsdp_reshard_after_forward,
                offload_policy=offload,
            )
        for name, child in blocks:
            self.lines.append(f"  {name}: {parameters_of(child):,}, here {local_of(child):,}")
        here = local_of(model) - sum(local_of(child) for _, child in blocks)
        self.lines.append(f"  root: {total - inside:,}, here {here:,}")
        return model

    def describe(self) -> list[str]:
        return self.lines

    def can_fuse(self) -> bool:
        # torch has a rule for sharded tensors for the fused AdamW, and none for the fused SGD.
        return self.spec.optimizer == "adamw"

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the mixed precision policy casts parameters and inputs instead

    def synchronise(self, last: bool) -> AbstractContextManager[object] | None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return None


def parameters_of(module: nn.Module) -> int:
    """Parameters of a module, all shards together."""
    return sum(p.numel() for p in module.parameters())


def local_of(module: nn.Module) -> int:
    """Parameters of a sharded module that this rank holds."""
    return sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
