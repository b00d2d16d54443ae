"""The cases of `verify`: the variants of every strategy, or a user's model; their tolerances."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from jobkit.errors import UsageError
from jobkit.payload.model import build_model
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS, Variant

DTYPES = {"float64": torch.float64, "float32": torch.float32}
CLASSES = 10
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
_OF_RESULT = ("clip_norm", "model", "device", "lr")  # change the result, and so single as well


@dataclass(frozen=True)
class Case:
    """A variant of a strategy."""

    strategy: str
    variant: Variant

    def tolerance(self, dtype: str) -> float:
        """The largest relative difference from single: that of the variant, or by rounding.

        That is the square root of the precision's unit roundoff: losses and gradients are sums of
        many terms, whose order differs, over a few steps.
        """
        within = self.variant.within
        return torch.finfo(DTYPES[dtype]).eps ** 0.5 if within is None else within

    def single(self) -> RunSpec:
        """The settings of the run that it is compared with."""
        shared = {k: v for k, v in self.variant.settings.items() if k in _OF_RESULT}
        return RunSpec(**{**SHARED, **shared, "strategy": "single"})

    def spec(self, world_size: int) -> RunSpec:
        """The settings of the run that is checked."""
        values = {**SHARED, **self.variant.settings, "strategy": self.strategy}
        return RunSpec(**values, ranks_per_node=world_size)


def layers(num_classes: int) -> nn.Module:
    """A small model of eight layers: enough for two pipeline stages on each of four ranks."""
    torch.manual_seed(1)
    modules: list[nn.Module] = []
    for channels in ((3, 6), (6, 8), (8, 8)):
        modules += [nn.Conv2d(*channels, 3, stride=2, padding=1), nn.Tanh()]
    modules.append(nn.Flatten())
    for width in ((128, 24), (24, 24), (24, 24), (24, 24)):
        modules += [nn.Linear(*width), nn.Tanh()]
    return nn.Sequential(*modules, nn.Linear(24, num_classes))


CASES = tuple(Case(name, variant) for name, facts in FACTS.items() for variant in facts.verified)


def cases_of(strategies: Sequence[str], world_size: int) -> list[Case]:
    """The cases of these strategies that run on this number of ranks."""
    cases = [case for case in CASES if case.strategy in strategies]
    return [c for c in cases if c.variant.worlds is None or world_size in c.variant.worlds]


def plan_model(
    name: str, device: str, strategies: Sequence[str], worlds: Sequence[int], classes: int
) -> tuple[dict[int, list[Case]], list[str]]:
    """The cases of a user's model by number of ranks, and the dtypes in which it computes.

    Each strategy is in its default settings. Raises UsageError for a model that cannot be made, or
    that is not the user's own.
    """
    if ":" not in name:
        raise UsageError(f"--model {name}: must be package.module:factory")
    model = build_model(RunSpec(model=name), classes)
    if still := hold_still(model):
        _note(f"{', '.join(still)} compute as in an evaluation: they differ over ranks by design")
    dtypes = list(DTYPES)
    try:
        model = model.double()
        model(torch.zeros(2, 3, 32, 32, dtype=torch.float64)).sum().backward()
    except (RuntimeError, TypeError, ValueError):
        dtypes = ["float32"]
        _note("the model does not compute in float64: compared in float32 only")
    settings = {"model": name, "device": device, "lr": 0.01}
    cases = [Case(strategy, Variant(strategy, settings)) for strategy in strategies]
    several = [case for case in cases if not FACTS[case.strategy].one_rank]
    return {world: cases if world == 1 else several for world in worlds}, dtypes


def _note(text: str) -> None:
    print(f"jobkit: note: {text}", file=sys.stderr)


def hold_still(model: nn.Module) -> list[str]:
    """Keep modules that differ between ranks by design out of training; return their classes.

    Batch normalisation has the statistics of each rank's own samples, and dropout its own draw:
    both compute as in an evaluation.
    """
    modules = [m for m in model.modules() if isinstance(m, _BatchNorm | _DropoutNd)]
    for module in modules:
        module.eval()
        module.train = lambda mode=True, same=module: same  # type: ignore[method-assign]
    return sorted({type(module).__name__ for module in modules})
