"""ZeRO-1 as a strategy of the tests alone: ddp whose optimizer state is sharded over the ranks.

python zero1.py ...    the payload's main, which knows it
"""

import inspect
import sys
from typing import Any

import pytest
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from jobkit.payload.main import leave, main
from jobkit.payload.strategies.ddp import DDP
from jobkit.spec import settings
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS, DDPFacts, Settings, Variant
from jobkit.spec.traffic import Message, ModelSize


class Zero1Facts(DDPFacts):
    name, code = "zero1", "zero1.Zero1"
    verified = (
        Variant("zero1"),
        Variant("zero1 accumulate, clip", {"accumulate": 3, "clip_norm": 0.05}),
    )

    def state_shards(self, settings: Settings) -> tuple[int, int, int]:
        return 1, 1, settings["nodes"] * settings["ranks_per_node"]

    def messages(self, settings: Settings, size: ModelSize) -> list[Message] | None:
        sent = super().messages(settings, size)
        return sent and [*sent, Message("broadcast", size.parameters, sent[0].scope)]


class Zero1(DDP):
    """Each parameter is stepped by one rank, which sends it to the others."""

    def make_optimizer(self) -> Optimizer:
        plain = super().make_optimizer()
        names = inspect.signature(type(plain)).parameters.keys() & plain.defaults
        given = {name: plain.defaults[name] for name in names}
        return ZeroRedundancyOptimizer(self.model.parameters(), type(plain), **given)

    def optimizer_state(self, optimizer: Any) -> dict[str, dict[str, Any]]:
        return super().optimizer_state(optimizer.optim)


def register(patch: pytest.MonkeyPatch) -> None:
    """Make it a strategy as the others are, with its row in the table and its module."""
    strategy = RunSpec.__dataclass_fields__["strategy"]
    patch.setattr(strategy, "metadata", {**strategy.metadata, "choices": (*FACTS, "zero1")})
    patch.setattr(settings, "_rules", settings._rules.__wrapped__)  # which keeps the old choices
    patch.setitem(sys.modules, "jobkit.payload.strategies.zero1", sys.modules[__name__])
    patch.setitem(FACTS, "zero1", Zero1Facts())


class Known:
    """As an inject of verify: a rank that unpickles it registers, and has no inject."""

    def __reduce__(self) -> tuple[Any, ...]:
        return register, (pytest.MonkeyPatch(),)


if __name__ == "__main__":
    register(pytest.MonkeyPatch())
    leave(main())
