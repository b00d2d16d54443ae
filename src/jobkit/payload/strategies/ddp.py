"""DistributedDataParallel: a full copy on each rank, gradients averaged in buckets."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from jobkit.payload.strategies.base import Strategy


class DDP(Strategy):
    """A full copy of model and optimizer on each rank; all-reduce overlaps the backward pass."""

    keeps_gradients = True

    def wrap(self, model: nn.Module) -> nn.Module:
        spec, on_gpu = self.spec, self.device.type == "cuda"
        wrapped = DistributedDataParallel(
            self.placed(model),
            device_ids=[self.device.index] if on_gpu else None,
            bucket_cap_mb=spec.ddp_bucket_mib,
            gradient_as_bucket_view=True,
            find_unused_parameters=spec.ddp_find_unused_parameters,
        )
        # Running statistics are shared before each evaluation (share_buffers): on a GPU a broadcast
        # in each forward pass would only take time. torch 2.14 renames the option, not this.
        wrapped.broadcast_buffers = not on_gpu
        self.prefix = "module."
        if spec.ddp_comm_hook == "powersgd":  # of rank 8, after 2 iterations of plain all-reduce
            state = powerSGD_hook.PowerSGDState(None, 8, 2, random_seed=spec.seed)
            wrapped.register_comm_hook(state, _power_sgd)
        elif spec.ddp_comm_hook != "none":
            hook = getattr(default_hooks, f"{spec.ddp_comm_hook}_compress_hook")
            wrapped.register_comm_hook(dist.group.WORLD, hook)
        return wrapped

    def describe(self) -> list[str]:
        spec = self.spec
        lines = [f"ddp: buckets of {spec.ddp_bucket_mib:g} MiB, gradients are views of them"]
        if spec.ddp_comm_hook != "none":
            lines.append(f"ddp: gradients are sent in {spec.ddp_comm_hook}")
        return lines

    def synchronise(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, DistributedDataParallel)
        return nullcontext() if last else self.model.no_sync()

    def step_memory(
        self, model: nn.Module | None, whole: int, shard: int
    ) -> tuple[int | None, int]:
        # A hook that compresses keeps its results beside the buckets; gradients that microbatches
        # add up without a reduction are beside them, too.
        hooks = {"none": 0.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1.0}
        return int(whole * (hooks[self.spec.ddp_comm_hook] + (self.spec.accumulate > 1))), 0

    def warm_up(self) -> None:
        # In its first iteration DDP finds the order in which gradients come, and then rebuilds
        # its buckets: sums over ranks are taken in the order of the buckets.
        self.model.train()
        blank = torch.zeros(2, 3, 32, 32, dtype=next(self.model.parameters()).dtype)
        labels = torch.zeros(2, dtype=torch.long)
        self.forward_backward(blank.to(self.device), labels.to(self.device), 0.0, last=True)


def _power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook, bucket by bucket on the CPU: Gloo's threads would send two in any order."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        future.wait()
    return future
