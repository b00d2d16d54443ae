"""DistributedDataParallel: a full copy on each rank, gradients averaged in buckets."""

from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.payload.strategies.base import Strategy


class DDP(Strategy):
    """A full copy of model and optimizer on each rank; all-reduce overlaps the backward pass."""

    name = "ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            self.placed(model),
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.spec.ddp_bucket_mib,
            gradient_as_bucket_view=self.spec.ddp_gradient_as_bucket_view,
        )

    def describe(self) -> list[str]:
        views = "views of" if self.spec.ddp_gradient_as_bucket_view else "copies beside"
        return [f"ddp: buckets of {self.spec.ddp_bucket_mib:g} MiB, gradients are {views} them"]

    def synchronise(self, last: bool) -> AbstractContextManager[object] | None:
        assert isinstance(self.model, DistributedDataParallel)
        return None if last else self.model.no_sync()
