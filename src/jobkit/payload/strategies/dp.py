"""nn.DataParallel: one process, one thread for each of the node's GPUs."""

import math

import torch
from torch import nn

from jobkit.payload.distributed import RankEnv
from jobkit.payload.memory import MIB, MemoryInputs
from jobkit.payload.strategies.base import Strategy
from jobkit.spec.runspec import RunSpec

_BUFFER = 10 * MIB  # torch.nn.parallel.comm.broadcast_coalesced's buffer_size


class DP(Strategy):
    """The batch is split over the GPUs of one process; the model is copied in each iteration."""

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.devices = torch.cuda.device_count() if device.type == "cuda" else 0

    def wrap(self, model: nn.Module) -> nn.Module:
        model = self.placed(model)
        return nn.DataParallel(model) if self.devices > 1 else model

    def describe(self) -> list[str]:
        if self.devices > 1:
            return [f"dp: the batch is split over {self.devices} GPUs in one process"]
        where = "one GPU" if self.devices else "the CPU"
        return [f"dp: on {where} this is the same as single"]

    def images_at_once(self, devices: int) -> int:
        return math.ceil(math.ceil(self.spec.steps_batch_size / devices) / self.spec.accumulate)

    def communication_bytes(self, inputs: MemoryInputs) -> int:
        return min(inputs.share.parameters, _BUFFER) if inputs.devices > 1 else 0
