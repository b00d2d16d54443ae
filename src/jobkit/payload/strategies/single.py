"""One process, no communication: the reference of the others."""

from torch import nn

from jobkit.payload.strategies.base import Strategy


class Single(Strategy):
    """The bare model."""

    name = "single"

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.placed(model)
