"""`verify --model`: what is compared for a user's model."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jobkit.checks.verify.cases import CLASSES, DTYPES, Case, of_model
from jobkit.checks.verify.rank import hold_still
from jobkit.errors import UsageError
from jobkit.payload.model import build_model
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS


def plan(
    name: str, device: str, strategies: list[str], worlds: list[int], given: Mapping[str, Any]
) -> tuple[dict[int, list[Case]], dict[str, Any]]:
    """The cases by number of ranks, and verify's other arguments.

    given: classes, and values of cases.OWN that the user has set.
    Raises UsageError for a model that cannot be made, or that is not the user's own.
    """
    if ":" not in name:
        raise UsageError(f"--model {name}: must be package.module:factory")
    given = dict(given)
    classes = given.pop("classes", CLASSES)
    model = build_model(RunSpec(model=name), classes)
    if held := hold_still(model):
        _note(f"{', '.join(held)} compute as in an evaluation: they differ over ranks by design")
    dtypes = [d for d in DTYPES if d != "float64" or _takes_float64(model)]
    if "float64" not in dtypes:
        _note("the model does not compute in float64: compared in float32 only")
    cases = of_model(name, device, strategies, given)
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
