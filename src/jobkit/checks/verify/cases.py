"""What `verify` compares: the strategies and their variants, and how far each may be off."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jobkit.spec.runspec import RunSpec

DTYPES = {"float64": torch.float64, "float32": torch.float32}
# Sums in another order differ by rounding, which each step carries on to the next.
EXACT = {"float64": 1e-9, "float32": 5e-4}
# 53 samples in batches of 24: the last batch has 5, which no number of ranks from 2 to 4 divides.
SHARED: Mapping[str, Any] = {
    "model": f"{__name__}:layers",
    "dataset": "synthetic",
    "train_samples": 53,
    "test_samples": 31,
    "global_batch_size": 24,
    "eval_batch_size": 9,
    "epochs": 2,
    "lr": 0.3,
    "device": "cpu",
    "fsdp_wrap_min_parameters": 600,
    "ddp_bucket_mib": 0.02,
}
_TRUTH = ("clip_norm",)  # what changes the result, and so belongs to single as well


@dataclass(frozen=True)
class Case:
    """A strategy with settings, and the largest relative difference from single, by dtype."""

    label: str
    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=lambda: EXACT)
    worlds: tuple[int, ...] | None = None  # None: any number of ranks

    @property
    def exact(self) -> bool:
        """Whether only rounding may tell it from one process."""
        return self.tolerance == EXACT

    @property
    def truth(self) -> str:
        """The name of the single run that it is compared with."""
        return "-".join(["single", *(f"{k}={v}" for k, v in self._shared().items())])

    def _shared(self) -> dict[str, Any]:
        return {k: v for k, v in self.settings.items() if k in _TRUTH}

    def single(self) -> RunSpec:
        """The settings of the run that is the truth."""
        return RunSpec(**{**SHARED, **self._shared(), "strategy": "single"})

    def spec(self, world_size: int) -> RunSpec:
        """The settings of the run that is checked."""
        given = {**SHARED, **self.settings, "strategy": self.strategy}
        return RunSpec(**given, ranks_per_node=world_size)


def layers(num_classes: int) -> nn.Module:
    """A small model of eight layers: enough for two pipeline stages on each of four ranks."""
    torch.manual_seed(1)
    made: list[nn.Module] = []
    for channels in ((3, 6), (6, 8), (8, 8)):
        made += [nn.Conv2d(*channels, 3, stride=2, padding=1), nn.Tanh()]
    made.append(nn.Flatten())
    for width in ((128, 24), (24, 24), (24, 24), (24, 24)):
        made += [nn.Linear(*width), nn.Tanh()]
    return nn.Sequential(*made, nn.Linear(24, num_classes))


def _within(tolerance: float) -> dict[str, float]:
    return dict.fromkeys(DTYPES, tolerance)


CASES = (
    Case("single", "single", worlds=(1,)),
    Case("ddp", "ddp"),
    Case("ddp static graph", "ddp", {"ddp_static_graph": True}),
    Case("ddp find unused", "ddp", {"ddp_find_unused_parameters": True}),
    Case("ddp zero1", "ddp", {"zero1": True}),
    Case("ddp accumulate, clip", "ddp", {"accumulate": 3, "clip_norm": 0.05}),
    Case("ddp checkpointing", "ddp", {"activation_checkpointing": True}),
    # fp16 keeps 11 bits of a number and bf16 8; PowerSGD keeps what a low rank can hold.
    Case("ddp fp16 hook", "ddp", {"ddp_comm_hook": "fp16"}, _within(2e-2)),
    Case("ddp bf16 hook", "ddp", {"ddp_comm_hook": "bf16"}, _within(1e-1)),
    Case(
        "ddp powersgd hook",
        "ddp",
        {"ddp_comm_hook": "powersgd", "ddp_powersgd_start": 2, "ddp_powersgd_rank": 8},
        _within(0.5),
    ),
    Case("fsdp", "fsdp"),
    Case("fsdp shards kept whole", "fsdp", {"fsdp_reshard_after_forward": False}),
    Case("fsdp hybrid", "fsdp", {"fsdp_hybrid_replicas": 2}, worlds=(2, 4)),
    Case("fsdp prefetch", "fsdp", {"fsdp_prefetch": 2}),
    Case("fsdp by class", "fsdp", {"fsdp_wrap": "Linear"}),
    Case("fsdp accumulate, clip", "fsdp", {"accumulate": 3, "clip_norm": 0.05}),
    Case("fsdp checkpointing", "fsdp", {"activation_checkpointing": True}),
    Case("dp", "dp", worlds=(1,)),
    Case("mp", "mp"),
    Case("mp accumulate, clip", "mp", {"accumulate": 3, "clip_norm": 0.05}),
    Case("pp gpipe", "pp", {"pipeline_schedule": "gpipe"}),
    Case("pp 1f1b", "pp", {"pipeline_schedule": "1f1b"}),
    Case("pp interleaved", "pp", {"pipeline_schedule": "interleaved"}),
    Case("pp accumulate, clip", "pp", {"accumulate": 2, "clip_norm": 0.05}),
    Case("pp checkpointing", "pp", {"activation_checkpointing": True}),
    Case("pp x ddp", "pp", {"pipeline_stages": 2, "clip_norm": 0.05}, worlds=(4,)),
)


def chosen(strategies: list[str], world_size: int) -> list[Case]:
    """The cases of these strategies that run on so many ranks."""
    return [
        case
        for case in CASES
        if case.strategy in strategies and (case.worlds is None or world_size in case.worlds)
    ]
