"""One process: alone (single), or with a thread for each of its node's GPUs (dp)."""

import torch
from torch import Tensor, nn

from jobkit.payload.distributed import RankEnv
from jobkit.payload.strategies.base import Strategy
from jobkit.spec.runspec import RunSpec


class Single(Strategy):
    """The bare model, without communication: the reference for the others."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.placed(model)


class InPrecision(nn.Module):
    """A model that enters the run's precision by itself.

    nn.DataParallel has a thread for each GPU, and torch's parallel_apply opens autocast there
    without the type: it would be the thread's default, fp16.
    """

    def __init__(self, inner: nn.Module, strategy: Strategy) -> None:
        super().__init__()
        self.inner, self._autocast = inner, strategy.autocast

    def forward(self, images: Tensor) -> Tensor:
        with self._autocast():
            logits: Tensor = self.inner(images)
        return logits


class DP(Strategy):
    """The batch is split over the GPUs of one process; the model is copied in each iteration."""

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.devices = torch.cuda.device_count() if device.type == "cuda" else 1  # a CPU is one

    def wrap(self, model: nn.Module) -> nn.Module:
        model = self.placed(model)
        if self.devices == 1:
            return model
        self.prefix = "module.inner."
        return nn.DataParallel(InPrecision(model, self))

    def describe(self) -> list[str]:
        if self.devices > 1:
            return [f"dp: the batch is split over {self.devices} GPUs in one process"]
        where = "one GPU" if self.device.type == "cuda" else "the CPU"
        return [f"dp: on {where} this is the same as single"]
