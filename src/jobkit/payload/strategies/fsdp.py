"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered group by group.

A rank waits for the others at each gather and each reduction, however small it is. So neighbouring
blocks are merged until a group has at least --fsdp-group-mib, which is about what a link carries
in the time of its latency; a model with no more than one such group is one group, the root's.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from jobkit.payload.strategies.base import Strategy, make_mesh, refuse
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import ModelSize
from jobkit.units import MIB

Blocks = list[tuple[str, nn.Module]]
_FP32 = 4  # bytes


@dataclass(frozen=True)
class ShardGroup:
    """Some modules, without those of groups inside of them."""

    name: str
    modules: tuple[nn.Module, ...]
    kept: bool = False  # the backward pass begins with its parameters: they stay gathered
    root: bool = False  # what is left of the model; it stays gathered, too
    exact: bool = False  # computes in fp32 at any precision


Sizes = list[tuple[ShardGroup, int]]


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.groups: Sizes = []  # with the parameters of each
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
        # Ranks of a node follow each other, so that the shards are inside of it.
        shape, names = (spec.fsdp_hybrid_replicas, self.shards), ("replicate", "shard")
        first = int(spec.fsdp_hybrid_replicas == 1)
        mesh = make_mesh(self, shape[first:], names[first:])
        self.groups = sizes(model, spec)  # before torch changes the names of the classes
        # On the CPU there is nothing to offload to, and no memory to pin.
        offloads = spec.fsdp_cpu_offload and self.device.type == "cuda"
        # Parameters stay contiguous: fully_shard refuses other memory formats. The input is
        # channels last all the same, which is what the convolutions go by.
        if not offloads:
            model.to(self.device)
        low, groups = spec.low_precision, [group for group, _ in self.groups]
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32 if low and spec.fsdp_reduce_fp32 else None,
        )
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        for group in groups:
            # The root's parameters and those of the last block are the first that the backward pass
            # needs: freed, they would be gathered again at once. None: torch's rule for a root.
            frees = None if group.root else not group.kept
            modules = list(group.modules)
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                mp_policy=exact if group.exact else policy,
                reshard_after_forward=frees if spec.fsdp_reshard_after_forward else False,
                offload_policy=CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy(),
            )
        prefetch(groups, spec.fsdp_prefetch)
        return model

    def describe(self) -> list[str]:
        spec, replicas = self.spec, self.spec.fsdp_hybrid_replicas
        where = f", {replicas} replicas, each sharded over {self.shards} ranks"
        kept = "" if spec.fsdp_reshard_after_forward else "; parameters stay gathered to the end"
        count = self.group_count()
        groups = "1 shard group" if count == 1 else f"{count} shard groups"
        return [f"fsdp: {groups}{where if replicas > 1 else ''}{kept}"]

    def group_count(self) -> int:
        """Number of groups that have parameters."""
        return sum(count > 0 for _, count in self.groups)

    def can_fuse(self) -> bool:
        # torch has a rule for sharded tensors for the fused Adams, and none for the fused SGD.
        return self.spec.optimizer != "sgd"

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


def prefetch(groups: Sequence[ShardGroup], ahead: int) -> None:
    """Gather the next groups while one computes, in the model's order and going backward."""
    blocks = [g.modules[0] for g in reversed(groups) if not (g.root or g.exact)]
    modules: list[FSDPModule] = [m for m in blocks if isinstance(m, FSDPModule)]
    for i, module in enumerate(modules):
        if ahead:
            module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
            module.set_modules_to_backward_prefetch(modules[max(0, i - ahead) : i][::-1])


def shard_groups(model: nn.Module, spec: RunSpec) -> list[ShardGroup]:
    """The groups as torch must be given them: what is inside comes first, the root last.

    Raises UsageError for a class of --fsdp-wrap that the model does not have.
    """
    norms = tuple(m for m in model.modules() if spec.low_precision and _is_normalisation(m))
    blocks = [(n, m) for n, m in blocks_of(model, spec) if not any(m is norm for norm in norms)]
    if spec.fsdp_wrap is not None:
        found = [ShardGroup(name, (module,)) for name, module in blocks]
    else:
        found = _merged(blocks, spec)
    # One for all of them: of each a group would be the smallest of messages.
    inner = [ShardGroup("batch normalisation", norms, kept=True, exact=True)] if norms else []
    return [*inner, *reversed(found), ShardGroup("root", (model,), root=True)]


def _merged(blocks: Blocks, spec: RunSpec) -> list[ShardGroup]:
    """Neighbouring blocks in groups, in the model's order; none where one group has them all."""
    least = spec.fsdp_group_mib * MIB
    found: list[Blocks] = [[]]
    for block in blocks:
        if found[-1] and (spec.fsdp_group_mib == 0 or _bytes(found[-1]) >= least):
            found.append([])
        found[-1].append(block)
    if spec.fsdp_group_mib and len(found) > 1 and _bytes(found[-1]) < least:
        found[-2:] = [found[-2] + found[-1]]
    if not found[0] or (spec.fsdp_group_mib and len(found) == 1):
        return []
    last = len(found) - 1
    return [
        ShardGroup(_name(each), tuple(m for _, m in each), kept=i == last)
        for i, each in enumerate(found)
    ]


def _name(blocks: Blocks) -> str:
    first, last = blocks[0][0], blocks[-1][0]
    return first if len(blocks) == 1 else f"{first} to {last}"


def _bytes(blocks: Blocks) -> int:
    return sum(parameters_of(module) for _, module in blocks) * _FP32


def _is_normalisation(module: nn.Module) -> bool:
    """Batch normalisation keeps fp32 in any precision: its statistics need it, and so must weights.

    As in torch's first FSDP, which left these modules out of mixed precision.
    """
    return isinstance(module, _BatchNorm) and any(True for _ in module.parameters())


def blocks_of(model: nn.Module, spec: RunSpec) -> Blocks:
    """The modules that can be sharded on their own, by name, in the model's order.

    The direct children, or with --fsdp-wrap the modules of these classes, outer before inner.
    """
    if spec.fsdp_wrap is None:
        return [(n, m) for n, m in _children(model) if parameters_of(m)]
    inside = [(n, m) for n, m in model.named_modules() if n]
    known = {type(m).__name__ for _, m in inside}
    wanted = {word.strip() for word in spec.fsdp_wrap.split(",")}
    for name in sorted(wanted - known):
        raise UsageError(
            f"--fsdp-wrap: the model has no module of class '{name}' "
            f"(it has: {', '.join(sorted(known))})"
        )
    return [(n, m) for n, m in inside if type(m).__name__ in wanted and parameters_of(m)]


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The direct children; of a list of modules, which is never called itself, its own."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", module) for inner, module in _children(child))
        else:
            yield name, child


def parameters_of(module: nn.Module) -> int:
    """Parameters of a module, all shards together."""
    return sum(p.numel() for p in module.parameters())


def sizes(model: nn.Module, spec: RunSpec) -> Sizes:
    """The groups as shard_groups has them, with the number of parameters of each."""
    taken: set[int] = set()
    found = []
    for group in shard_groups(model, spec):
        own = {id(p): p.numel() for m in group.modules for p in m.parameters()}
        found.append((group, sum(n for key, n in own.items() if key not in taken)))
        taken |= own.keys()
    return found


def model_size(groups: Sizes) -> ModelSize:
    """What of the model decides FSDP's traffic. A group without parameters sends nothing."""
    counted = [(group.kept or group.root, _FP32 * count) for group, count in groups if count]
    return ModelSize(
        parameters=sum(size for _, size in counted),
        shard_groups=tuple(size for kept, size in counted if not kept),
        kept_groups=tuple(size for kept, size in counted if kept),
    )
