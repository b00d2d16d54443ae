"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered group by group.

Which modules make a group is in shard_groups.py.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from jobkit.payload.distributed import RankEnv
from jobkit.payload.strategies.base import Strategy, make_mesh, refuse
from jobkit.payload.strategies.shard_groups import (
    ShardGroup,
    Sizes,
    shard_groups,
    sizes,
)
from jobkit.spec.runspec import RunSpec


class FSDP(Strategy):
    """Each rank holds 1 / world_size of parameters, gradients and optimizer state."""

    measured_by = "replica"

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
        # On the CPU there is nothing to offload to, and no memory to pin.
        offloads = spec.fsdp_cpu_offload and self.device.type == "cuda"
        replicas = spec.fsdp_hybrid_replicas
        # Ranks of a node follow each other, so that the shards are inside of it.
        shape, names = (replicas, self.shards), ("replicate", "shard")
        mesh = make_mesh(self, *((shape, names) if replicas > 1 else (shape[1:], names[1:])))
        self.groups = sizes(model, spec)  # before torch changes the names of the classes
        self._shard(model, mesh, offloads)
        return model

    def wrap_alone(self, model: nn.Module, alone: dist.ProcessGroup) -> nn.Module:
        # Without offload: copies to and from the host count as communication.
        self._shard(model, DeviceMesh.from_group(alone, self.device.type), offloads=False)
        return model

    def _shard(self, model: nn.Module, mesh: DeviceMesh, offloads: bool) -> None:
        """Shard a model over the ranks of a mesh."""
        # Parameters stay contiguous: fully_shard refuses other memory formats. The input is
        # channels last all the same, which is what the convolutions go by.
        spec = self.spec
        if not offloads:
            model.to(self.device)
        low, groups = spec.low_precision, shard_groups(model, spec)
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32 if low and spec.fsdp_reduce_fp32 else None,
        )
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        for group in groups:
            modules = list(group.modules)
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                mp_policy=exact if group.exact else policy,
                reshard_after_forward=self._reshards(group),
                offload_policy=CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy(),
            )
        prefetch(groups, spec.fsdp_prefetch)

    def _reshards(self, group: ShardGroup) -> bool | None:
        """Whether parameters are freed after the forward pass; None: as torch has it for a root.

        The root's and those of the last block are the first that the backward pass needs: freed,
        they would be gathered again at once.
        """
        if not self.spec.fsdp_reshard_after_forward:
            return False
        return None if group.root else not group.kept

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

    def synchronise(self, model: nn.Module, last: bool) -> AbstractContextManager[object] | None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return None


def prefetch(groups: Sequence[ShardGroup], ahead: int) -> None:
    """Gather the next groups while one computes, in the model's order and going backward."""
    blocks = [g.modules[0] for g in reversed(groups) if not (g.root or g.exact)]
    modules: list[FSDPModule] = [m for m in blocks if isinstance(m, FSDPModule)]
    for i, module in enumerate(modules):
        if ahead:
            module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
            module.set_modules_to_backward_prefetch(modules[max(0, i - ahead) : i][::-1])
