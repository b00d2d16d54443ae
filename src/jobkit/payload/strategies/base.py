"""What every strategy does: wrap a model, make a micro-batch's gradients, predict."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.payload.distributed import Place
from jobkit.spec import RunSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy(ABC):
    """A model under one parallel strategy. The training loop knows nothing else of it."""

    name: str

    def __init__(self, spec: RunSpec, place: Place, device: torch.device) -> None:
        self.spec, self.place, self.device = spec, place, device
        self.dtype = DTYPES[spec.precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.model: nn.Module = nn.Identity()

    def setup(self, model: nn.Module) -> None:
        """Move the model to the device, wrap it, and compile it where that is wanted."""
        self.model = self.wrap(model)
        if self.spec.compile:
            self.model.compile()

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, under the strategy."""

    def describe(self) -> list[str]:
        """Lines for a reader: how the model is wrapped."""
        return []

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in the channels-last memory format where that is wanted."""
        if self.spec.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model.to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the run's precision. Weights stay in fp32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def can_fuse(self) -> bool:
        """Whether torch's fused optimizer takes the strategy's parameters."""
        return True

    def synchronise(self, last: bool) -> AbstractContextManager[object] | None:
        """Reduce gradients over the ranks in the last micro-batch of a step only."""
        return None

    def forward_backward(self, images: Tensor, labels: Tensor, weight: float, last: bool) -> Tensor:
        """Add the gradients of weight * (sum of losses) to the model's; return the sum of losses.

        images (N, 3, 32, 32), labels (N,); N may be 0: the rank still takes part in collectives.
        last: this is the last micro-batch of the step, so gradients are reduced over the ranks.
        """
        if len(labels) == 0:
            images, labels, weight = images.new_zeros(1, 3, 32, 32), labels.new_zeros(1), 0.0
        scope = self.synchronise(last)
        if scope is not None:
            with scope:
                return self._forward_backward(images, labels, weight)
        return self._forward_backward(images, labels, weight)

    def _forward_backward(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        with self.autocast():
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        self.scaler.scale(loss * weight).backward()
        return loss.detach() * (weight != 0)

    def share_buffers(self) -> None:
        """Make running statistics, such as those of batch normalisation, the ranks' mean.

        Every rank has its own otherwise, and its part of the evaluation would be of another model.
        """
        if self.place.world_size > 1:
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= self.place.world_size

    def predict(self, images: Tensor) -> Tensor:
        """Logits (N, classes) in fp32, without gradients; every rank must call as often."""
        with torch.no_grad(), self.autocast():
            return self.model(images).float()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip where wanted, step, and forget the gradients."""
        if self.spec.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)


def make_optimizer(strategy: Strategy) -> torch.optim.Optimizer:
    """SGD or AdamW over the strategy's parameters, fused where torch has that for the device."""
    spec = strategy.spec
    parameters = [p for p in strategy.model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError(f"--model {spec.model}: has no parameter to train")

    def make(fused: bool) -> torch.optim.Optimizer:
        if spec.optimizer == "adamw":
            return torch.optim.AdamW(
                parameters, lr=spec.lr, weight_decay=spec.weight_decay, fused=fused
            )
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov and spec.momentum > 0,
            weight_decay=spec.weight_decay,
            fused=fused,
        )

    return make(fused=strategy.can_fuse())
