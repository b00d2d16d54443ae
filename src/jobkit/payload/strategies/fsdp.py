"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered group by group.

A rank waits for the others at each gather and each reduction, however small it is. So neighbouring
blocks are merged until a group has at least --fsdp-group-mib, which is about what a link carries
in the time of its latency; a model with no more than one such group is one group, the root's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _BatchNorm

from jobkit.errors import UsageError
from jobkit.payload.distributed import RankEnv
from jobkit.payload.strategies.base import FP32, Strategy, make_mesh
from jobkit.payload.strategies.blocks import children_of
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import ModelSize
from jobkit.units import MIB


@dataclass(frozen=True)
class ShardGroup:
    """Some modules, without those of groups inside of them."""

    modules: list[nn.Module]
    parameters: int = 0  # all shards together
    kept: bool = False  # the backward pass begins with its parameters: they stay gathered
    root: bool = False  # what is left of the model; it stays gathered, too
    exact: bool = False  # computes in fp32 at any precision


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    keeps_gradients = casts_parameters = True

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.groups: list[ShardGroup] = []
        # torch has a rule for sharded tensors for the fused Adams, and none for the fused SGD.
        self.can_fuse = spec.optimizer != "sgd"
        self.offloads = spec.fsdp_cpu_offload
        self.shards = place.world_size // spec.fsdp_hybrid_replicas  # ranks of one replica

    def check(self) -> None:
        super().check()
        replicas, world = self.spec.fsdp_hybrid_replicas, self.place.world_size
        if world % replicas:
            raise UsageError(f"--fsdp-hybrid-replicas {replicas} does not divide the {world} ranks")

    def wrap(self, model: nn.Module) -> nn.Module:
        spec, replicas = self.spec, self.spec.fsdp_hybrid_replicas
        # Ranks of a node follow each other, so that the shards are inside of it.
        dimensions = {"replicate": replicas} if replicas > 1 else {}
        mesh = make_mesh(self, **dimensions, shard=self.shards)
        self.groups = shard_groups(model, spec)  # before torch changes the names of the classes
        self.shard_groups = sum(group.parameters > 0 for group in self.groups)
        # On the CPU there is nothing to offload to, and no memory to pin.
        offloads = self.offloads and self.device.type == "cuda"
        # Parameters stay contiguous: fully_shard refuses other memory formats. The input is
        # channels last all the same, which is what the convolutions go by.
        if not offloads:
            model.to(self.device)
        low = spec.low_precision
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32 if low and spec.fsdp_reduce_fp32 else None,
        )
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        for group in self.groups:
            # The root's parameters and those of the last block are the first that the backward pass
            # needs: freed, they would be gathered again at once. None: torch's rule for a root.
            frees = None if group.root else not group.kept
            fully_shard(
                group.modules if len(group.modules) > 1 else group.modules[0],
                mesh=mesh,
                mp_policy=exact if group.exact else policy,
                reshard_after_forward=frees if spec.fsdp_reshard_after_forward else False,
                offload_policy=CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy(),
            )
        if spec.fsdp_prefetch:
            prefetch(self.groups, spec.fsdp_prefetch)
        return model

    def describe(self) -> list[str]:
        count, replicas = self.shard_groups, self.spec.fsdp_hybrid_replicas
        text = f"fsdp: {count} shard group{'s' * (count != 1)}"
        if replicas > 1:
            text += f", {replicas} replicas, each sharded over {self.shards} ranks"
        if not self.spec.fsdp_reshard_after_forward:
            text += "; parameters stay gathered to the end"
        return [text]

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the mixed precision policy casts parameters and inputs instead

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"replicas": self.spec.fsdp_hybrid_replicas}

    def settle(self) -> None:
        # After an evaluation they may still be gathered, and are not the optimizer's then.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def synchronise(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def step_memory(
        self, model: nn.Module | None, whole: int, shard: int
    ) -> tuple[int | None, int]:
        """Of gathered parameters, and of the largest group's gradients before their reduction.

        The root stays gathered; of the blocks there are the one that computes and those gathered
        ahead, or all of them where they are kept after the forward pass.
        """
        spec = self.spec
        if model is None:
            return None if spec.fsdp_reshard_after_forward else whole, 0
        groups = shard_groups(model, spec)
        root = sum(g.parameters for g in groups if g.root or g.exact)
        blocks = [g.parameters for g in reversed(groups) if not (g.root or g.exact)]
        at_once = 1 + max(1, spec.fsdp_prefetch)
        kept = sum(blocks)
        if spec.fsdp_reshard_after_forward:
            kept = max((sum(blocks[i : i + at_once]) for i in range(len(blocks))), default=0)
        size = 2 if spec.low_precision else FP32
        gathered = (root + kept) * size
        if spec.accumulate > 1:  # gradients that microbatches add up stay whole
            return gathered + max(0, whole - shard), 0
        # A group's parameters are free again when it is reduced, in fp32 where that is set.
        reduced = max([root, *blocks]) * (FP32 if spec.fsdp_reduce_fp32 else size)
        largest = max(p.numel() for p in model.parameters()) * size
        return gathered + max(0, reduced - shard), largest

    def size_of(self, model: nn.Module) -> ModelSize:
        """The groups that send; one without parameters sends nothing."""
        groups = [g for g in shard_groups(model, self.spec) if g.parameters]
        counted = [(g.kept or g.root, FP32 * g.parameters) for g in groups]
        return ModelSize(
            parameters=sum(size for _, size in counted),
            shard_groups=tuple(size for kept, size in counted if not kept),
            kept_groups=tuple(size for kept, size in counted if kept),
        )


def prefetch(groups: Sequence[ShardGroup], ahead: int) -> None:
    """Gather the next groups while one computes, in the model's order and going backward."""
    blocks = [g.modules[0] for g in reversed(groups) if not (g.root or g.exact)]
    modules: list[FSDPModule] = [m for m in blocks if isinstance(m, FSDPModule)]
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
        module.set_modules_to_backward_prefetch(modules[max(0, i - ahead) : i][::-1])


def shard_groups(model: nn.Module, spec: RunSpec) -> list[ShardGroup]:
    """The groups as torch must be given them: what is inside comes first, the root last.

    Raises UsageError for a class of --fsdp-wrap that the model does not have.
    """
    # Batch normalisation keeps fp32 in any precision: its statistics need it, and so must weights.
    # As in torch's first FSDP, which left these modules out of mixed precision. One group for all
    # of them: of each a group would be the smallest of messages.
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and parameters_of(m)]
    norms = norms if spec.low_precision else []
    blocks = [m for m in blocks_of(model, spec) if m not in norms]
    if spec.fsdp_wrap is None:
        merged = _merged(blocks, spec.fsdp_group_mib * MIB)
        found = [ShardGroup(modules, kept=modules is merged[-1]) for modules in merged]
    else:
        found = [ShardGroup([module]) for module in blocks]
    inner = [ShardGroup([*norms], kept=True, exact=True)] if norms else []
    groups, taken = [], set[nn.Parameter]()
    for group in (*inner, *reversed(found), ShardGroup([model], root=True)):
        own = {p for m in group.modules for p in m.parameters()} - taken
        groups.append(replace(group, parameters=sum(p.numel() for p in own)))
        taken |= own
    return groups


def _merged(blocks: list[nn.Module], least: float) -> list[list[nn.Module]]:
    """Neighbouring blocks in groups of so many bytes at least, in the model's order.

    None where one group would have them all; 0: each block alone.
    """

    def too_small(group: list[nn.Module]) -> bool:
        return FP32 * sum(map(parameters_of, group)) < least

    merged: list[list[nn.Module]] = []
    for block in blocks:
        if merged and too_small(merged[-1]):
            merged[-1].append(block)
        else:
            merged.append([block])
    if len(merged) > 1 and too_small(merged[-1]):
        last = merged.pop()
        merged[-1] += last
    return [] if least and len(merged) == 1 else merged


def blocks_of(model: nn.Module, spec: RunSpec) -> list[nn.Module]:
    """The modules that can be sharded on their own, in the model's order.

    The direct children, or with --fsdp-wrap the modules of these classes, outer before inner.
    """
    if spec.fsdp_wrap is None:
        return [m for m in children_of(model) if parameters_of(m)]
    inside = [m for m in model.modules() if m is not model]
    known = {type(m).__name__ for m in inside}
    wanted = {word.strip() for word in spec.fsdp_wrap.split(",")}
    for name in sorted(wanted - known):
        raise UsageError(
            f"--fsdp-wrap: the model has no module of class '{name}' "
            f"(it has: {', '.join(sorted(known))})"
        )
    return [m for m in inside if type(m).__name__ in wanted and parameters_of(m)]


def parameters_of(module: nn.Module) -> int:
    """Parameters of a module, all shards together."""
    return sum(p.numel() for p in module.parameters())
