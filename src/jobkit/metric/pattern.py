"""Patterns: what the lines of a program's own log mean, as named groups of regular expressions.

    pattern = load_pattern("nanogpt")               a file of hpc/patterns, or a path

The file has expressions by free names, and of, spans and contains. A group's name says its
quantity and unit (_NAMES), as in a [METRIC] key=value line; any other name is a free column.
Whether a rate is of all ranks or of one must be said, by "of" or by the name.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jobkit.errors import ANSI, UsageError, nearest, one_of
from jobkit.files import read_toml
from jobkit.metric.kinds import Record
from jobkit.paths import REPOSITORY, find_named
from jobkit.program.lines import finite

PATTERNS = REPOSITORY / "hpc" / "patterns"
OF = ("total", "per_rank")
# What a line's time or rate covers: one step; the steps since the line before; all since the start.
SPANS = ("step", "interval", "running")
SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
MIB = {"kib": 2.0**-10, "mib": 1.0, "gib": 2.0**10}
MIB |= {"kb": 1e3 / 2**20, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}
_SCALES = SECONDS | MIB
_KEYS = ("program", "contains", "of", "spans", "sample")
_ALIASES = {"loss": "train_loss", "accuracy": "val_accuracy"}
_TIME, _ONE_RANK = f"_(?P<in>{'|'.join(SECONDS)})", "(?P<one_rank>_per_(?:gpu|rank|device))?"
# How a name says its quantity, what is counted, the unit that it is in, and that it is of one rank.
_NAMES = {
    "step": "steps?|iteration|iter|global_step",
    "epoch": "epoch",
    "step_time": f"(?:step_time|iteration_time|time_per_step){_TIME}",
    "data_wait": f"(?:data_wait|data_time){_TIME}",
    "rate": rf"(?P<unit>[a-z]\w*?)_per{_TIME}{_ONE_RANK}",
    "work": rf"(?P<unit>[a-z]\w*?)_per_step{_ONE_RANK}",
    "memory": f"(?:peak_)?memory_(?P<in>{'|'.join(MIB)})",
}

# A comma or _ divides thousands. A decimal comma is not read: 0,031 is no number.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:_[0-9]{3})+)|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)
LONGEST_LINE = 8192  # characters of a line that a pattern is tried on
MEASURES = ("step_time", "rate")  # one of which makes a line an observation
_WRAPPED = re.compile(r"(?:np|numpy|torch|tensor)[\w.]*\((.*)\)")  # as np.float32(1.25)
_TIMES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}  # behind a rate or work: 12.3k


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
    for kind, pattern in _NAMES.items():
        if match := re.fullmatch(pattern, name.lower()):
            parts = match.groupdict()
            scale = _SCALES.get(parts.get("in", ""), 1.0)
            scale = 1 / scale if kind == "rate" else scale
            return Quantity(kind, scale, parts.get("unit", ""), bool(parts.get("one_rank")))
    return Quantity("free", name=_ALIASES.get(name.lower(), name))


def read_value(text: str, name: str = "") -> Any:
    """A text as a number where it is one, None for NaN and infinity.

    name: of the value; behind a rate or work k, M and G are factors.
    """
    word = text.strip().strip("'\"").rstrip(",")
    if wrapped := _WRAPPED.fullmatch(word):
        word = wrapped[1]
    is_amount = word[-1:] in _TIMES and quantity_of(name).kind in ("rate", "work")
    digits, scale = (word[:-1], _TIMES[word[-1]]) if is_amount else (word, 1)
    if not _NUMBER.fullmatch(digits):
        return None if word.lower().lstrip("+-") in ("nan", "inf", "infinity") else word
    digits = digits.replace(",", "").replace("_", "")
    if digits.lstrip("+-").isdigit() and len(digits) < 19:  # longer ones may not be of 64 bits
        return int(digits) * scale
    return finite(float(digits) * scale)


def observes(record: Record) -> bool:
    """Whether a key=value line says a time or a rate of steps."""
    return any(quantity_of(k).kind in MEASURES and is_above_0(v) for k, v in record.items())


def is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def lines_of(stream: BinaryIO) -> Iterator[tuple[str, bool]]:
    """The lines of a log without colours, and whether each has its end.

    A progress bar's steps are lines too.
    """
    text = io.TextIOWrapper(stream, "utf-8", "replace", newline="\n")
    while line := text.readline(1 << 20):
        *bars, last = line.rstrip("\r\n").split("\r")
        for part, whole in (*((bar, True) for bar in bars), (last, line.endswith("\n"))):
            if part:
                yield ANSI.sub("", part)[:LONGEST_LINE], whole


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How the lines of one program are read."""

    name: str
    lines: tuple[str, ...]  # regular expressions, tried in this order on each line
    spans: str
    of: str | None = None  # of a rate or of work: total or per_rank
    program: str = ""  # whose lines they are
    contains: str = ""  # what its times have in them, in the words of a report
    sample: str = ""  # lines of the program, for its test


def load_pattern(source: str | Path) -> Pattern:
    """The pattern of a TOML file, by its path or its bare name in hpc/patterns.

    Raises UsageError for a file that is absent, for an expression that does not compile or has no
    group that says a time or a rate, without "spans", and for a rate of which "of" is not said.
    """
    path = find_named("pattern", source, PATTERNS)
    values = read_toml(path)
    try:
        _check(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    lines = tuple(text for key, text in values.items() if key not in _KEYS)
    return Pattern(name=path.stem, lines=lines, **{k: v for k, v in values.items() if k in _KEYS})


def _check(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a table that is no pattern."""
    quantities: dict[str, Quantity] = {}
    for key, text in values.items():
        if not isinstance(text, str):
            raise UsageError(f"{key} must be a string")
        if key in _KEYS:
            continue
        try:
            groups = re.compile(text).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{key} does not compile: {error}") from None
        if not groups:
            hint = nearest(key, _KEYS)
            raise UsageError(f"{key} has no named group, as (?P<step>[0-9]+){hint}")
        quantities |= {group: quantity_of(group) for group in groups}
    if not quantities:
        raise UsageError("no regular expression in it")
    if not any(q.kind in ("step_time", "rate") for q in quantities.values()):
        has = ", ".join(quantities)
        raise UsageError(
            f"no group says a time or a rate, as step_time_ms or tokens_per_s; it has {has}"
        )
    for group, quantity in quantities.items():
        if quantity.kind in ("rate", "work") and not quantity.per_rank and "of" not in values:
            add = "Add of = 'total' or of = 'per_rank'"
            raise UsageError(f"is {group} of all ranks or of one? {add}")
    if "spans" not in values:
        raise UsageError(
            "what does a line's time cover? Add spans = 'step' (one step), 'interval' (the "
            "steps since the line before) or 'running' (all since the start)"
        )
    one_of("spans", values["spans"], SPANS)
    if "of" in values:
        one_of("of", values["of"], OF)
