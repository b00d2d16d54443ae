"""What one setting of RunSpec is: how it is declared, and what its value may be."""

import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jobkit.errors import UsageError, one_of


def setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    option: bool = True,
    identity: bool = True,
) -> Any:
    """Declare a field: its default, one line of help, its range, and what it takes part in.

    option: the payload takes it as an argument. identity: it is part of the run's identity (its
    run_id); a setting that cannot change the outcome or the speed, such as a path, is not.
    """
    meta = {"help": text, "choices": choices, "low": low, "high": high}
    return field(default=default, metadata={**meta, "option": option, "identity": identity})


def plain_type(hint: Any) -> tuple[type, bool]:
    """The type in a field's hint and whether the field may be left out (None)."""
    if isinstance(hint, types.UnionType):
        (plain,) = (a for a in typing.get_args(hint) if a is not type(None))
        return plain, True
    return hint, False


def check(name: str, hint: Any, meta: Mapping[str, Any], value: Any) -> Any:
    """Return the value as the setting's type; raise UsageError that says what it may be."""
    plain, optional = plain_type(hint)
    if value is None and optional:
        return None
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wrong = UsageError(f"{name} = {value!r}: must be {describe(hint, meta)}")
    if type(value) is not plain:
        raise wrong
    if meta["choices"]:
        one_of(name.replace("_", " "), value, meta["choices"])
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    low, high = meta["low"], meta["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        raise wrong
    if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(f"{name} = {value!r}: has a control character")
    return value


def describe(hint: Any, meta: Mapping[str, Any]) -> str:
    """What a setting may be, in words."""
    plain, _ = plain_type(hint)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[plain]
    low, high = meta["low"], meta["high"]
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    return f"{words}, {low} or more" if low is not None else words
