"""The parallel strategies, one file each; all compute the step that one process would make."""

from jobkit.payload.strategies.base import Strategy
from jobkit.payload.strategies.ddp import DDP
from jobkit.payload.strategies.dp import DP
from jobkit.payload.strategies.fsdp import FSDP
from jobkit.payload.strategies.pipeline import ModelParallel, Pipeline
from jobkit.payload.strategies.single import Single

_ALL: tuple[type[Strategy], ...] = (Single, DP, DDP, FSDP, ModelParallel, Pipeline)
STRATEGIES: dict[str, type[Strategy]] = {s.name: s for s in _ALL}

__all__ = ["STRATEGIES", "Strategy"]
