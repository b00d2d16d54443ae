"""The parallel strategies, one file each; all compute the step that one process would make."""

from importlib import import_module

from jobkit.payload.strategies.base import Strategy
from jobkit.spec.strategies import FACTS


def strategy_class(name: str) -> type[Strategy]:
    """The class of a strategy; no other strategy's part of torch is imported for it."""
    module, kind = FACTS[name].code.split(".")
    found = getattr(import_module(f"{__name__}.{module}"), kind)
    assert issubclass(found, Strategy)
    return found


__all__ = ["Strategy", "strategy_class"]
