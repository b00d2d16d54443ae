"""Patterns: what the lines of a program's own log mean, as named groups of regular expressions.

    pattern = load_pattern("nanogpt")               a file of hpc/patterns, or a path
    pattern = own_pattern({"of": "total", "line": "step (?P<step>[0-9]+) ..."})

A group's name says its quantity and unit: step, step_time_ms, tokens_per_s_per_gpu,
samples_per_step, train_loss; any other name is a free column. Nothing is guessed: a name without
its unit is free. Whether a rate is of all ranks or of one must be said, by "of" or by the name.
Names are the same for a [METRIC] key=value line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.files import read_text
from jobkit.paths import REPOSITORY, find_named

SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
MIB = {
    "kib": 2.0**-10,
    "mib": 1.0,
    "gib": 2.0**10,
    "kb": 1e3 / 2**20,
    "mb": 1e6 / 2**20,
    "gb": 1e9 / 2**20,
}
_TIMES = {
    "step_time": "step_time",
    "iteration_time": "step_time",
    "time_per_step": "step_time",
    "data_wait": "data_wait",
    "data_time": "data_wait",
}
_STEP, _EPOCH = ("step", "steps", "iteration", "iter", "global_step"), ("epoch",)
_ALIASES = {"loss": "train_loss", "accuracy": "val_accuracy"}
_TIME = re.compile(rf"({'|'.join(_TIMES)})_({'|'.join(SECONDS)})")
_RATE = re.compile(rf"([a-z]\w*?)_per_({'|'.join(SECONDS)})(_per_(?:gpu|rank|device))?")
_WORK = re.compile(r"([a-z]\w*?)_per_step(_per_(?:gpu|rank|device))?")
_MEMORY = re.compile(rf"(?:peak_)?memory_({'|'.join(MIB)})")


@dataclass(frozen=True)
class Quantity:
    """The meaning of a named value."""

    kind: str  # step, epoch, step_time, data_wait, rate, work, memory or free
    scale: float = 1.0  # times the value: seconds, units per second, MiB
    unit: str = ""  # of a rate or work: tokens, samples, images, steps
    per_rank: bool = False  # the name says that it is of one rank
    name: str = ""  # of a free value: its column


def quantity_of(name: str) -> Quantity:
    """The quantity that a name stands for."""
    plain = name.lower()
    if plain in _STEP:
        return Quantity("step")
    if plain in _EPOCH:
        return Quantity("epoch")
    if found := _TIME.fullmatch(plain):
        return Quantity(_TIMES[found[1]], SECONDS[found[2]])
    if found := _RATE.fullmatch(plain):
        return Quantity("rate", 1 / SECONDS[found[2]], found[1], bool(found[3]))
    if found := _WORK.fullmatch(plain):
        return Quantity("work", 1.0, found[1], bool(found[2]))
    if found := _MEMORY.fullmatch(plain):
        return Quantity("memory", MIB[found[1]])
    return Quantity("free", name=_ALIASES.get(plain, name))


PATTERNS = REPOSITORY / "hpc" / "patterns"
OF = ("total", "per_rank")
# What a line's time or rate covers: one step; the steps since the line before; all since the start.
SPANS = ("step", "interval", "running")
_KEYS = ("program", "source", "contains", "of", "spans", "sample")
_MEASURES = ("step_time", "rate")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How the lines of one program are read."""

    name: str
    lines: tuple[str, ...]  # regular expressions, tried in this order on each line
    of: str | None = None  # of a rate or of work: total or per_rank
    spans: str = "interval"
    program: str = ""  # whose lines they are
    source: str = ""  # where the program prints them
    contains: str = ""  # what its times have in them, in the words of a report
    sample: str = ""  # lines of the program, for its test


def load_pattern(source: str | Path, *, new: bool = False) -> Pattern:
    """The pattern of a TOML file, by its path or its bare name in hpc/patterns.

    new: as of own_pattern. Raises UsageError for a file that is absent or no pattern.
    """
    import tomllib  # here, because the payload imports this package on Python 3.10 too

    path = find_named("pattern", source, PATTERNS)
    try:
        values = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable TOML file: {error}") from None
    try:
        return own_pattern(values, name=path.stem, new=new)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def own_pattern(values: Mapping[str, Any], name: str = "own", *, new: bool = False) -> Pattern:
    """The pattern of a table: its regular expressions by free names, and of, spans, contains.

    new: nothing was measured with it yet, so that it has to say "spans"; else interval counts where
    it does not. Raises UsageError for an expression that does not compile or has no group that says
    a time or a rate, and for a rate of which "of" is not said.
    """
    lines = {k: v for k, v in values.items() if k not in _KEYS}
    for key, value in values.items():
        if not isinstance(value, str):
            raise UsageError(f"pattern {name}: {key} must be a string")
    if not lines:
        raise UsageError(f"pattern {name}: no regular expression in it")
    spans = values.get("spans", "interval")
    one_of("spans", spans, SPANS)
    of = values.get("of")
    if of is not None:
        one_of("of", of, OF)
    groups = [group for key, text in lines.items() for group in _groups(name, key, text)]
    _check_measures(name, groups, of)
    if new and "spans" not in values:
        raise UsageError(
            f"pattern {name}: what does a line's time cover? Add spans = 'step' (one step), "
            "'interval' (the steps since the line before) or 'running' (all since the start)"
        )
    known = {k: values[k] for k in ("program", "source", "contains", "sample") if k in values}
    return Pattern(name=name, lines=tuple(lines.values()), of=of, spans=spans, **known)


def pattern_of(spec: object, *, new: bool = False) -> Pattern | None:
    """The pattern that a planned run names or has; None for one without.

    new: as of own_pattern. Raises UsageError where it is none.
    """
    if named := getattr(spec, "pattern", None):
        return load_pattern(named, new=new)
    own = getattr(spec, "patterns", None)
    return own_pattern(own, new=new) if own else None


def _groups(name: str, key: str, text: str) -> list[str]:
    """The named groups of one expression. Raises UsageError where it has none."""
    try:
        found = list(re.compile(text).groupindex)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"pattern {name}: {key} does not compile: {error}") from None
    if not found:
        hint = nearest(key, _KEYS)
        raise UsageError(f"pattern {name}: {key} has no named group, as (?P<step>[0-9]+){hint}")
    return found


def _check_measures(name: str, groups: list[str], of: str | None) -> None:
    """Raise UsageError where no group is a time or a rate, or a rate's ranks are not said."""
    found = {group: quantity_of(group) for group in groups}
    if not any(q.kind in _MEASURES for q in found.values()):
        raise UsageError(
            f"pattern {name}: no group says a time or a rate, as step_time_ms or tokens_per_s; "
            f"it has {', '.join(dict.fromkeys(groups))}"
        )
    for group, quantity in found.items():
        if quantity.kind in ("rate", "work") and not quantity.per_rank and of is None:
            raise UsageError(
                f"pattern {name}: is {group} of all ranks or of one? Add of = 'total' or "
                "of = 'per_rank'"
            )
