"""The cases of `verify`: the variants of every strategy, or a user's model; their tolerances."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from jobkit.errors import UsageError
from jobkit.payload.model import build_model
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
        values = {**SHARED, **self.settings, "strategy": self.strategy}
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


def cases_of_model(
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


def cases_of(strategies: list[str], world_size: int) -> list[Case]:
    """The cases of these strategies that run on this number of ranks."""
    return [
        case
        for case in CASES
        if case.strategy in strategies and (case.worlds is None or world_size in case.worlds)
    ]


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


def plan_model(
    name: str, device: str, strategies: list[str], worlds: list[int], given: Mapping[str, Any]
) -> tuple[dict[int, list[Case]], dict[str, Any]]:
    """The cases by number of ranks, and verify's other arguments.

    given: classes, and values of cases.OWN that the user has set.
    Raises UsageError for a model that cannot be made, or that is not the user's own.
    """
    if ":" not in name:
        raise UsageError(f"--model {name}: must be package.module:factory")
    values = dict(given)
    classes = values.pop("classes", CLASSES)
    model = build_model(RunSpec(model=name), classes)
    if still := hold_still(model):
        _note(f"{', '.join(still)} compute as in an evaluation: they differ over ranks by design")
    dtypes = [d for d in DTYPES if d != "float64" or _takes_float64(model)]
    if "float64" not in dtypes:
        _note("the model does not compute in float64: compared in float32 only")
    cases = cases_of_model(name, device, strategies, values)
    plans = {
        n: [c for c in cases if n == 1 or not FACTS[c.strategy].one_rank]
        for n in dict.fromkeys(worlds)
    }
    return plans, {"dtypes": dtypes, "device": device, "classes": classes}


def _note(text: str) -> None:
    print(f"jobkit: note: {text}", file=sys.stderr)


def _takes_float64(model: nn.Module) -> bool:
    """Whether the model computes in float64, backward too."""
    model = model.double()
    try:
        model(torch.zeros(2, 3, 32, 32, dtype=torch.float64)).sum().backward()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
