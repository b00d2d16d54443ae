"""The parallel strategies, one file each; all compute the step that one process would make."""

from importlib import import_module

from jobkit.payload.strategies.base import Strategy
from jobkit.spec.strategies import FACTS, Facts


def _class_of(facts: Facts) -> type[Strategy]:
    module, name = facts.code.split(".")
    found = getattr(import_module(f"{__name__}.{module}"), name)
    assert issubclass(found, Strategy)
    return found


STRATEGIES: dict[str, type[Strategy]] = {name: _class_of(facts) for name, facts in FACTS.items()}

__all__ = ["STRATEGIES", "Strategy"]
