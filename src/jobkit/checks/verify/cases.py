"""The cases of `verify`: the variants of every strategy, and the tolerance of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS

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
    "warmup_iterations": 0,  # every step is observed
    "lr": 0.3,
    "device": "cpu",
    "precision": "fp32",
    "fsdp_group_mib": 0.004,  # three groups
    "ddp_bucket_mib": 0.02,
}
# Settings that change the result, and so belong to single as well.
_OF_RESULT = (
    *("clip_norm", "model", "device", "lr"),
    *("optimizer", "global_batch_size", "train_samples"),
)


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
        return self.tolerance == EXACT or "model" in self.settings

    @property
    def reference(self) -> str:
        """The name of the single run that it is compared with."""
        return "-".join(["single", *(f"{k}={v}" for k, v in self._shared().items())])

    def _shared(self) -> dict[str, Any]:
        return {k: v for k, v in self.settings.items() if k in _OF_RESULT}

    def single(self) -> RunSpec:
        """The settings of the reference run."""
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


CASES = tuple(
    Case(
        variant.label,
        name,
        variant.settings,
        EXACT if variant.within is None else dict.fromkeys(DTYPES, variant.within),
        variant.worlds,
    )
    for name, facts in FACTS.items()
    for variant in facts.verified
)


# What --model may set, with what is taken where it does not.
OWN: Mapping[str, Any] = {"global_batch_size": 24, "optimizer": "sgd", "lr": 0.01}
CLASSES = 10


def of_model(
    model: str, device: str, strategies: list[str], given: Mapping[str, Any] = OWN
) -> list[Case]:
    """One case for each strategy of a user's model, in the strategy's default settings.

    given: values of OWN. Two whole batches and a last one of five samples make an epoch.
    The tolerance is the square root of the precision's unit roundoff eps: losses and gradients are
    sums of many terms, whose order differs, over a few steps with a small learning rate.
    """
    near = {name: torch.finfo(dtype).eps ** 0.5 for name, dtype in DTYPES.items()}
    settings = {**OWN, **given, "model": model, "device": device}
    settings["train_samples"] = 2 * settings["global_batch_size"] + 5
    return [Case(name, name, settings, near) for name in strategies]


def chosen(strategies: list[str], world_size: int) -> list[Case]:
    """The cases of these strategies that run on this number of ranks."""
    return [
        case
        for case in CASES
        if case.strategy in strategies and (case.worlds is None or world_size in case.worlds)
    ]
