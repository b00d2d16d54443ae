"""How a field of a specification is declared and checked."""

import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from jobkit.errors import UsageError, has_control, one_of

_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_MANY = {str: "strings", int | str: "whole numbers or strings", Any: "values"}


def setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    option: bool = True,
    identity: bool = True,
    multiline: bool = False,
    group: str = "",
) -> Any:
    """Declare a field: its default, one line of help, its range, and what it takes part in.

    low: of a list its least length. option: the payload takes it as an argument. identity: it is
    part of the run's identity (its run_id), unless it can change neither outcome nor speed.
    """
    meta = {"help": text, "choices": choices, "low": low, "high": high, "multiline": multiline}
    meta |= {"option": option, "identity": identity, "group": group}
    if default == {}:
        return field(default_factory=dict, metadata=meta)
    return field(default=default, metadata=meta)


def check_fields(spec: Any) -> None:
    """Check every field of a frozen dataclass and give it its field's type; raises UsageError."""
    for name, hint, meta, default in _rules(spec.__class__):
        value = getattr(spec, name)
        # Most are at their default, which is sound; an empty list may be too short.
        if type(value) is not type(default) or value != default or type(value) is tuple:
            object.__setattr__(spec, name, check(name, hint, meta, value))


@functools.cache
def _rules(kind: type) -> tuple[tuple[str, Any, Mapping[str, Any], Any], ...]:
    """The name, type hint, metadata and default of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.metadata, f.default) for f in fields(kind))


def plain_type(hint: Any) -> tuple[Any, bool]:
    """The type in a field's hint and whether the field may be left out (None)."""
    if isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint):
        (plain,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
        return plain, True
    return hint, False


def check(name: str, hint: Any, meta: Mapping[str, Any], value: Any) -> Any:
    """Return the value as the field's type; raise UsageError that says what it may be."""
    plain, optional = plain_type(hint)
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if (value is None and optional) or plain is Any:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        return {k: check(f"{name} {k}", inner[1], meta, v) for k, v in value.items()}
    low, high = meta.get("low"), meta.get("high")
    if origin is tuple:
        kinds = typing.get_args(inner[0]) or inner
        fits = isinstance(value, (list, tuple)) and len(value) >= (low or 0)
        fits = fits and (Any in kinds or all(type(item) in kinds for item in value))
        value = tuple(value) if fits else value
    else:
        if plain is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        fits = type(value) is plain and not (plain is float and not math.isfinite(value))
        fits = fits and (low is None or low <= value) and (high is None or value <= high)
    if not fits:
        raise UsageError(f"{name} = {value!r}: must be {describe(hint, meta)}")
    if meta.get("choices"):
        one_of(name.replace("_", " "), value, meta["choices"])
    for text in value if origin is tuple else [value]:
        if isinstance(text, str) and has_control(text, multiline=bool(meta.get("multiline"))):
            raise UsageError(f"{name} = {text!r}: has a control character")
    return value


def describe(hint: Any, meta: Mapping[str, Any]) -> str:
    """What a field may be, in words."""
    plain, _ = plain_type(hint)
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if origin is Mapping or plain is Any:
        return "a table"
    words = f"a list of {_MANY[inner[0]]}" if origin is tuple else _ONE[plain]
    low, high = meta.get("low"), meta.get("high")
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    return f"{words}, {low} or more" if low is not None else words
