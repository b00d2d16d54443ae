"""nn.DataParallel: one process, one thread for each of the node's GPUs."""

from typing import ClassVar

import torch
from torch import nn

from jobkit.payload.strategies.base import Strategy


class DP(Strategy):
    """The batch is split over the GPUs of one process; the model is copied in each iteration."""

    name = "dp"
    refuses: ClassVar = {
        "compile": "the threads would share one compiled model, which torch does not support",
        "activation_checkpointing": "the copies on the other GPUs would compute on the first again",
    }

    def wrap(self, model: nn.Module) -> nn.Module:
        model = self.placed(model)
        self.devices = torch.cuda.device_count() if self.device.type == "cuda" else 0
        return nn.DataParallel(model) if self.devices > 1 else model

    def describe(self) -> list[str]:
        if self.devices > 1:
            return [f"dp: the batch is split over {self.devices} GPUs in one process"]
        where = "one GPU" if self.devices else "the CPU"
        return [f"dp: on {where} this is the same as single"]
