"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered block by block.

The wrapping rule: each direct child of the model with at least --fsdp-wrap-min-parameters
parameters is a block of its own, or each module of a class that --fsdp-wrap names, wherever it is;
what is left belongs to the root.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from jobkit.payload.distributed import RankEnv
from jobkit.payload.memory import MemoryInputs, Share, shard_bytes
from jobkit.payload.strategies.base import Strategy, refuse
from jobkit.spec.runspec import RunSpec

Blocks = list[tuple[str, nn.Module]]


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    measured_by = "replica"

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.blocks: Blocks = []
        self.sharded: nn.Module = nn.Identity()
        self.shards = place.world_size // spec.fsdp_hybrid_replicas  # ranks of one replica

    def check(self) -> None:
        super().check()
        replicas, world = self.spec.fsdp_hybrid_replicas, self.place.world_size
        refuse(
            world % replicas != 0,
            f"--fsdp-hybrid-replicas {replicas} does not divide the {world} ranks",
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        spec = self.spec
        # On the CPU there is nothing to offload to, and no memory to pin.
        offloads = spec.fsdp_cpu_offload and self.device.type == "cuda"
        replicas = spec.fsdp_hybrid_replicas
        mesh = init_device_mesh(self.device.type, (self.place.world_size,))
        if replicas > 1:  # ranks of a node follow each other, so that the shards are inside of it
            shape, names = (replicas, self.shards), ("replicate", "shard")
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self.blocks, self.sharded = self._shard(model, mesh, offloads), model
        return model

    def wrap_alone(self, model: nn.Module, alone: dist.ProcessGroup) -> nn.Module:
        # Without offload: copies to and from the host count as communication.
        self._shard(model, DeviceMesh.from_group(alone, self.device.type), offloads=False)
        return model

    def _shard(self, model: nn.Module, mesh: DeviceMesh, offloads: bool) -> Blocks:
        """Shard a model over the ranks of a mesh; return the blocks sharded on their own."""
        # Parameters stay contiguous: fully_shard refuses other memory formats. The input is
        # channels last all the same, which is what the convolutions go by.
        spec = self.spec
        if not offloads:
            model.to(self.device)
        low, blocks = spec.precision != "fp32", blocks_of(model, spec)
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32 if low and spec.fsdp_reduce_fp32 else None,
        )
        norms = [("", m) for m in model.modules() if low and _is_normalisation(m)]
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        # What is inside comes first.
        for name, module in [*norms, *reversed(blocks), ("root", model)]:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy if name else exact,
                reshard_after_forward=self._reshards(root=module is model),
                offload_policy=CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy(),
            )
        prefetch(blocks, spec.fsdp_prefetch)
        return blocks

    def _reshards(self, root: bool) -> bool | None:
        """Whether parameters are freed after the forward pass; None: as torch has it for a root.

        The root's are the first that the backward pass needs: freed, they would be gathered again
        at once.
        """
        return (
            None
            if root and self.spec.fsdp_reshard_after_forward
            else (self.spec.fsdp_reshard_after_forward)
        )

    def describe(self) -> list[str]:
        spec, replicas = self.spec, self.spec.fsdp_hybrid_replicas
        kept = "" if spec.fsdp_reshard_after_forward else "; parameters stay gathered to the end"
        where = f"{replicas} replicas, each sharded over {self.shards} ranks"
        head = f"fsdp: {where}{kept}" if replicas > 1 or kept else "fsdp"
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

    def synchronise(self, model: nn.Module, last: bool) -> AbstractContextManager[object] | None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return None

    def bytes_here(self, parameter: Tensor) -> int:
        # FSDP2 pads each shard to that of the first rank; optimizer state has no padding.
        return shard_bytes(parameter, self.shards, 0)

    def with_state(self, trained: Sequence[Tensor], rank: int) -> list[int]:
        return [shard_bytes(p, self.shards, rank % self.shards) for p in trained]

    def communication_bytes(self, inputs: MemoryInputs) -> int | None:
        if inputs.model is not None:
            return _gathered(self.spec, inputs.model)
        if self.spec.fsdp_reshard_after_forward:
            return None
        # All of them, whatever the blocks are.
        return inputs.parameters * (4 if self.spec.precision == "fp32" else 2)

    def host_bytes(self, share: Share) -> int:
        return share.total - share.buffers if self.spec.fsdp_cpu_offload else 0


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


def block_parameters(spec: RunSpec, model: nn.Module) -> tuple[list[int], int]:
    """Parameters of each block that FSDP gathers, in the model's order, and those of the root."""
    of = {id(p): "" for p in model.parameters()}
    blocks = blocks_of(model, spec)
    for name, block in blocks:  # inner after outer, and a parameter belongs to the innermost
        of.update({id(p): name for p in block.parameters()})
    sizes: Counter[str] = Counter()
    for p in model.parameters():
        sizes[of[id(p)]] += p.numel()
    return [sizes[name] for name, _ in blocks if sizes[name]], sizes[""]


def _gathered(spec: RunSpec, model: nn.Module) -> int:
    """Bytes of the gathered parameters, and of one block's gradients in a reduction.

    The root stays gathered throughout; of the blocks there are the one that computes and those
    that are gathered ahead, or all of them where they are kept after the forward pass. One
    block's gradients are whole, and once more in the input of the reduce-scatter; those that
    micro-batches add up stay whole until the last one.
    """
    blocks, root = block_parameters(spec, model)
    low = spec.precision != "fp32"
    size = 2 if low else 4
    reduced = 4 if not low or spec.fsdp_reduce_fp32 else 2
    at_once = 1 + max(1, spec.fsdp_prefetch)
    windows = [sum(blocks[i : i + at_once]) for i in range(len(blocks))]
    kept = max(windows, default=0) if spec.fsdp_reshard_after_forward else sum(blocks)
    added_up = (root + sum(blocks)) * reduced if spec.accumulate > 1 else 0
    return (root + kept) * size + max([root, *blocks]) * (size + reduced) + added_up


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
