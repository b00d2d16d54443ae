"""One process, no communication: the reference for the others."""

from torch import nn

from jobkit.payload.strategies.base import Strategy


class Single(Strategy):
    """The bare model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.placed(model)
