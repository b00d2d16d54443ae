"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered block by block.

The wrapping rule: each direct child of the model with at least --fsdp-wrap-min-parameters
parameters is a block of its own, or each module of a class that --fsdp-wrap names, wherever it is;
what is left belongs to the root.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from jobkit.errors import UsageError
from jobkit.payload.strategies.base import Strategy, refuse
from jobkit.payload.strategies.recompute import checkpoint_blocks
from jobkit.spec.runspec import RunSpec

Blocks = list[tuple[str, nn.Module]]


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    name = "fsdp"
    measured_by = "replica"

    def check(self) -> None:
        super().check()
        copies, world = self.spec.fsdp_hybrid_replicas, self.place.world_size
        refuse(
            world % copies != 0,
            f"--fsdp-hybrid-replicas {copies}: {world} ranks do not make so many equal copies",
        )

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
        blocks = blocks_of(model, spec)
        world, copies = self.place.world_size, spec.fsdp_hybrid_replicas
        mesh = init_device_mesh(self.device.type, (world,))
        if copies > 1:  # ranks of a node follow each other, so that the shards are inside of it
            shape, names = (copies, world // copies), ("replicate", "shard")
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        norms = [("", m) for m in model.modules() if low and _is_normalisation(m)]
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        # What is inside comes first.
        for name, module in [*norms, *reversed(blocks), ("root", model)]:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy if name else exact,
                reshard_after_forward=spec.fsdp_reshard_after_forward,
                offload_policy=CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy(),
            )
        prefetch(blocks, spec.fsdp_prefetch)
        self.blocks, self.sharded = blocks, model
        return model

    def plain(self, model: nn.Module) -> nn.Module:
        # As the mixed precision policy has it: parameters and inputs cast, contiguous.
        if self.spec.activation_checkpointing:
            checkpoint_blocks(model)
        model.to(self.device, self.dtype)
        for module in model.modules():
            if _is_normalisation(module):
                module.float()
        return model

    def pass_alone(self, replica: nn.Module, images: Tensor, labels: Tensor, weight: float) -> None:
        super().pass_alone(replica, images.to(self.dtype), labels, weight)

    def describe(self) -> list[str]:
        spec, copies = self.spec, self.spec.fsdp_hybrid_replicas
        kept = "" if spec.fsdp_reshard_after_forward else "; parameters stay gathered to the end"
        where = f"{copies} copies, each sharded over {self.place.world_size // copies} ranks"
        head = f"fsdp: {where}{kept}" if copies > 1 or kept else "fsdp"
        return [f"{head}: blocks, parameters in all, and on this rank", *self._tree()]

    def _tree(self) -> list[str]:
        """What is sharded on its own, block in block, and last what the root keeps."""
        lines = []
        for name, block in self.blocks:
            depth = 1 + sum(name.startswith(f"{other}.") for other, _ in self.blocks)
            lines.append("  " * depth + f"{name}: {_amounts(own_of(block))}")
        return [*lines, f"  root: {_amounts(own_of(self.sharded))}"]

    def can_fuse(self) -> bool:
        # torch has a rule for sharded tensors for the fused AdamW, and none for the fused SGD.
        return self.spec.optimizer == "adamw"

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the mixed precision policy casts parameters and inputs instead

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"replicas": self.spec.fsdp_hybrid_replicas}

    def settle(self) -> None:
        # After an evaluation they may still be gathered, and are not the optimizer's then.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def synchronise(self, last: bool) -> AbstractContextManager[object] | None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return None


def _is_normalisation(module: nn.Module) -> bool:
    """Batch normalisation keeps fp32 in any precision: its statistics need it, and so must weights.

    As in torch's first FSDP, which left these modules out of mixed precision.
    """
    return isinstance(module, _BatchNorm) and any(True for _ in module.parameters())


def blocks_of(model: nn.Module, spec: RunSpec) -> Blocks:
    """The modules to shard on their own, by name, in the model's order, outer before inner."""
    if spec.fsdp_wrap is None:
        least = spec.fsdp_wrap_min_parameters
        return [(n, m) for n, m in model.named_children() if parameters_of(m) >= least]
    inside = [(n, m) for n, m in model.named_modules() if n]
    known = {type(m).__name__ for _, m in inside}
    wanted = {word.strip() for word in spec.fsdp_wrap.split(",")}
    for name in sorted(wanted - known):
        raise UsageError(
            f"--fsdp-wrap: the model has no module of class '{name}' "
            f"(it has: {', '.join(sorted(known))})"
        )
    return [(n, m) for n, m in inside if type(m).__name__ in wanted and parameters_of(m)]


def prefetch(blocks: Blocks, ahead: int) -> None:
    """Gather the next blocks while one computes, in the model's order and going backward."""
    modules: list[FSDPModule] = [m for _, m in blocks if isinstance(m, FSDPModule)]
    for i, module in enumerate(modules):
        if ahead:
            module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
            module.set_modules_to_backward_prefetch(modules[max(0, i - ahead) : i][::-1])


def parameters_of(module: nn.Module) -> int:
    """Parameters of a module, all shards together."""
    return sum(p.numel() for p in module.parameters())


def own_of(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of a block, without those of the blocks inside of it."""
    inner = {
        id(p)
        for m in module.modules()
        if m is not module and isinstance(m, FSDPModule)
        for p in m.parameters()
    }
    return [p for p in module.parameters() if id(p) not in inner]


def _amounts(parameters: list[nn.Parameter]) -> str:
    """Parameters in all, and what of them is here: number and bytes."""
    local = [p.to_local() for p in parameters if isinstance(p, DTensor)]
    held = sum(t.numel() * t.element_size() for t in local)
    whole = sum(p.numel() for p in parameters)
    return f"{whole:,}, here {sum(t.numel() for t in local):,}, {held:,} bytes"
