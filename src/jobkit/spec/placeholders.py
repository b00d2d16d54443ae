"""Placeholders of a command: "{batch}" and "{40 // ranks}", replaced by the values of a run.

Between braces stands whole-number arithmetic over names: + - * // % and parentheses, and /, which
must divide without a remainder. Nothing else is evaluated. {{ and }} are braces.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jobkit.errors import UsageError, nearest

Value = int | float | str | bool

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WHOLE = re.compile(r"\{([^{}]*)\}")
_LONGEST = 200  # characters of an expression
_LARGEST = 10**15
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_WHAT = "names, whole numbers, + - * / // % and parentheses"


def fill(text: str, names: Mapping[str, Value]) -> str:
    """The text with each placeholder replaced. Raises UsageError that says what is wrong."""

    def replaced(part: re.Match[str]) -> str:
        if part[1] is not None:
            return str(_value(part[1], names))
        if part[0] in ("{{", "}}"):
            return part[0][0]
        raise UsageError(f"{text!r}: a single '{part[0]}': write {part[0] * 2} for a brace")

    return _PART.sub(replaced, text)


def resolve(value: Any, names: Mapping[str, Value]) -> Any:
    """The value with its placeholders replaced; a text that is one placeholder keeps its type."""
    if not isinstance(value, str):
        return value
    whole = _WHOLE.fullmatch(value)
    return _value(whole[1], names) if whole else fill(value, names)


def resolve_all(given: Mapping[str, Any], names: Mapping[str, Value]) -> dict[str, Value]:
    """Parameters with their placeholders replaced; they may name each other, in no circle.

    Raises UsageError that names the parameter.
    """
    done: dict[str, Value] = dict(names)
    waiting = dict(given)
    while waiting:
        ready = [n for n, v in waiting.items() if not used(v) & waiting.keys()]
        if not ready:
            raise UsageError(f"parameters {', '.join(waiting)}: each needs another one's value")
        for name in ready:
            try:
                done[name] = resolve(waiting.pop(name), done)
            except UsageError as error:
                raise UsageError(f"parameter {name}: {error}") from None
    return {name: done[name] for name in given}


def used(value: Any) -> set[str]:
    """The names in the placeholders of a value."""
    texts = [p[1] for p in _PART.finditer(value) if p[1]] if isinstance(value, str) else []
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}


def _value(text: str, names: Mapping[str, Value]) -> Value:
    """The value of what stands between two braces."""
    if (name := text.strip()) in names:
        return names[name]
    try:
        if len(text) > _LONGEST:
            raise ValueError
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _no_arithmetic(text) from None
    return _number(tree, text, names)


def _number(node: ast.expr, text: str, names: Mapping[str, Value]) -> int:
    """The value of a part of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        found = _named(node.id, text, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _number(node.operand, text, names)
        found = -found if isinstance(node.op, ast.USub) else found
    elif isinstance(node, ast.BinOp):
        left, right = _number(node.left, text, names), _number(node.right, text, names)
        found = _combined(node.op, left, right, text)
    else:
        raise _no_arithmetic(text)
    if abs(found) > _LARGEST:
        raise UsageError(f"{{{text}}}: the number is too large")
    return found


def _combined(op: ast.operator, left: int, right: int, text: str) -> int:
    exact = isinstance(op, ast.Div)
    if not exact and type(op) not in _OPERATORS:
        raise _no_arithmetic(text)
    if right == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
        raise UsageError(f"{{{text}}}: divides by zero")
    if exact and left % right:
        raise UsageError(
            f"{{{text}}}: {left} / {right} is not a whole number (// would round down)"
        )
    return left // right if exact else _OPERATORS[type(op)](left, right)


def _named(name: str, text: str, names: Mapping[str, Value]) -> int:
    if name not in names:
        hint = nearest(name, names)
        known = "" if hint else f" (known: {', '.join(names)})"
        raise UsageError(f"{{{text}}}: unknown name '{name}'{hint}{known}; write {{{{ for a brace")
    if type(value := names[name]) is not int:
        raise UsageError(f"{{{text}}}: {name} is {value!r}, and arithmetic is of whole numbers")
    return value


def _no_arithmetic(text: str) -> UsageError:
    shown = text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
    return UsageError(f"{{{shown}}}: not arithmetic of {_WHAT}; write {{{{ for a brace")
