"""The parallel strategies, one file each; all compute the step that one process would make."""

from jobkit.payload.strategies.base import Strategy
from jobkit.payload.strategies.ddp import DDP
from jobkit.payload.strategies.fsdp import FSDP
from jobkit.payload.strategies.single import Single

STRATEGIES: dict[str, type[Strategy]] = {s.name: s for s in (Single, DDP, FSDP)}

__all__ = ["STRATEGIES", "Strategy"]
