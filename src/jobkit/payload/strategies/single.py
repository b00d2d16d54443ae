"""One process, no communication: the reference for the others."""

from torch import nn

from jobkit.payload.memory import MemoryInputs
from jobkit.payload.strategies.base import Strategy


class Single(Strategy):
    """The bare model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.placed(model)

    def communication_bytes(self, inputs: MemoryInputs) -> int:
        return 0
