"""Observations from what a program printed: its own lines by a pattern, or key=value lines."""

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import regex

from jobkit.analysis.collect.steps import Observation, Observed, each_once, of_lines
from jobkit.errors import ANSI, UsageError
from jobkit.metric.kinds import Record
from jobkit.metric.pattern import Pattern, Quantity, quantity_of
from jobkit.outcome.evidence import START_MARK

METRIC_LINES = "metric lines"  # the source of key=value lines
LONGEST_LINE = 8192  # characters of a line that a pattern is tried on
TIMEOUT_S = 2.0  # of one expression on one line: a study may have been handed over
CUT: Mapping[str, str] = {}  # the groups of a line that may have lost its end
_ENDS_IN_NUMBER = re.compile(r"[0-9][0-9.]*(?:[eE][+-]?)?\Z")
_ATTEMPT = re.compile(rf"{re.escape(START_MARK)}: attempt ([0-9]{{1,9}})\b")
# A comma or _ divides thousands. A decimal comma is not read: 0,031 is no number.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:_[0-9]{3})+)|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)
_TIMES = {"k": 1e3, "M": 1e6, "G": 1e9}  # behind a rate or work: 12.3k
_MEASURES = ("step_time", "rate")
_OWN_KEYS = frozenset(("rank", "attempt", "kind", "run_id", "study", "t", "seq"))


def matches(stream: BinaryIO, pattern: Pattern) -> Iterator[tuple[int, int, Mapping[str, str]]]:
    """Each line of a log that the pattern finds: attempt, number of the line, its groups' texts.

    CUT stands for the groups of a line whose last number may have lost its end. Raises UsageError
    where an expression takes longer than TIMEOUT_S on a line.
    """
    tried = [regex.compile(text) for text in pattern.lines]
    attempt = 0
    for number, line, whole in _lines(stream):
        if mark := _ATTEMPT.search(line):
            attempt = int(mark[1])
        for expression in tried:
            try:
                found = expression.search(line, timeout=TIMEOUT_S)
            except TimeoutError:
                raise UsageError(
                    f"pattern {pattern.name}: took longer than {TIMEOUT_S:g} s on line {number}"
                ) from None
            if found:
                cut = not whole and found.end() == len(line) and _ENDS_IN_NUMBER.search(line)
                yield attempt, number, CUT if cut else _groups(found)
                break


def _groups(found: Any) -> Mapping[str, str]:
    return {name: text for name, text in found.groupdict().items() if text}


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str, bool]]:
    """The lines of a log without colours; a progress bar's steps are lines too.

    The last value: whether a line has its end.
    """
    text = io.TextIOWrapper(stream, "utf-8", "replace", newline="\n")
    number = 1
    while line := text.readline(1 << 20):
        *steps, last = line.rstrip("\r\n").split("\r")
        for part, whole in (*((step, True) for step in steps), (last, line.endswith("\n"))):
            if part:
                yield number, ANSI.sub("", part)[:LONGEST_LINE], whole
        number += line.endswith("\n")


def observed_lines(
    found: Iterable[tuple[int, int, Mapping[str, str]]],
    pattern: Pattern,
    ranks: int | None,
    planned: Mapping[str, Any],
) -> Observed | None:
    """The observations of the lines that a pattern found; None where no line says a time or rate.

    Where no such line can be used there is none of them, and why.

    ranks: how many a rate of one rank is multiplied by. planned: unit, work_per_step and
    warmup_steps of the study.
    """
    of_one = pattern.of == "per_rank"
    made: list[Observation] = []
    cut, unread = 0, list[str]()
    for attempt, _, groups in found:
        cut += groups is CUT
        values = {name: _plain(name, text) for name, text in groups.items()}
        unread += [f"{name}={groups[name].strip()}" for name in _unread(values)][:1]
        one = _observation(values, of_one, ranks, planned.get("unit"))
        if one.time_s or one.rate:
            made.append(replace(one, attempt=attempt))
    once, repeated = each_once(made, ranks)
    steps = of_lines(once, _warmup(planned), pattern.spans == "step")
    if pattern.spans == "running":
        steps = [replace(steps[-1], warmup=False)] if steps else []
    source = f"pattern {pattern.name}"
    observed = _observed(steps, planned, source, pattern.spans == "step")
    if not (observed or cut or unread):
        return None
    observed = observed or Observed(source=source)
    return replace(observed, cut=cut, unread=unread, repeated=repeated)


def _unread(values: Mapping[str, Any]) -> list[str]:
    """The groups of a line that should say a time or a rate, and are no number above 0."""
    measures = (name for name in values if quantity_of(name).kind in _MEASURES)
    return [name for name in measures if not _is_above_0(values[name])]


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def observed_metrics(
    records: Sequence[Record], ranks: int | None, planned: Mapping[str, Any]
) -> Observed | None:
    """The observations of [METRIC] key=value lines that say a time or a rate, and no epoch."""
    made: list[Observation] = []
    for record in records:
        if "v" in record or ("epoch" in record and "step" not in record):
            continue
        one = _of_record(record, ranks, planned.get("unit"))
        if one.time_s or one.rate:
            made.append(one)
    return _observed(of_lines(made, _warmup(planned), False), planned, METRIC_LINES)


def observes(record: Record) -> bool:
    """Whether a key=value line says a time or a rate of steps."""
    one = _of_record(record, 1)
    return bool(one.time_s or one.rate)


def _of_record(record: Record, ranks: int | None, wanted: str | None = None) -> Observation:
    values = {k: v for k, v in record.items() if k not in _OWN_KEYS}
    return _observation(values, False, ranks, wanted)


def _warmup(planned: Mapping[str, Any]) -> int:
    value = planned.get("warmup_steps")
    return value if type(value) is int else 0


def _observed(
    steps: Sequence[Observation], planned: Mapping[str, Any], source: str, single: bool = False
) -> Observed | None:
    """The observations in one unit: of those in another one the times alone remain."""
    if not steps:
        return None
    unit, per_step = planned.get("unit"), planned.get("work_per_step")
    if per_step:
        steps = [_of_steps(one, per_step, unit) for one in steps]
    said = Counter(one.unit for one in steps if one.unit)
    timed = per_step and any(one.time_s for one in steps)
    if said and unit not in said and not (unit and timed):
        per_step = None if unit else per_step
        unit = said.most_common(1)[0][0]
    steps = [o if o.unit in (None, unit) else replace(o, rate=None, work=None) for o in steps]
    return Observed(steps=steps, unit=unit, work_per_step=per_step, single=single, source=source)


def _of_steps(one: Observation, per_step: float, unit: str | None) -> Observation:
    """A rate in steps per second as one in units of work."""
    if one.unit != "steps" or not one.rate:
        return one
    return replace(one, rate=one.rate * per_step, unit=unit)


def _observation(
    values: Mapping[str, Any], of_one: bool, ranks: int | None, wanted: str | None
) -> Observation:
    """One line as an observation of one step.

    Of several rates the first one in the wanted unit counts, else the first, and work in its unit.
    A number that cannot be one of its quantity, as a rate of -1 or 0, says that it is not known.
    """
    values = {name: v for name, v in values.items() if _is_possible(name, v)}
    fields: dict[str, Any] = {}
    free: dict[str, Any] = {}
    unit = _unit(values, wanted)
    for name, value in values.items():
        quantity = quantity_of(name)
        if quantity.kind == "free" or type(value) not in (int, float):
            free[quantity.name or name] = value
        elif quantity.kind in ("rate", "work"):
            if quantity.unit == unit:
                scaled = _over_ranks(value * quantity.scale, quantity, of_one, ranks)
                fields.setdefault(quantity.kind, scaled)
        elif quantity.kind in ("step", "epoch"):
            fields[quantity.kind] = value if type(value) is int else None
        else:
            fields[_FIELD[quantity.kind]] = value * quantity.scale
    return Observation(**fields, unit=unit, values=free)


def _is_possible(name: str, value: Any) -> bool:
    """Whether a value may be one of its quantity: times, rates, work and memory are above 0."""
    kind = quantity_of(name).kind
    if type(value) not in (int, float) or kind in ("free", "step", "epoch"):
        return True
    return _is_above_0(value) or (kind == "data_wait" and value == 0)


def _unit(values: Mapping[str, Any], wanted: str | None) -> str | None:
    """The unit of a line's rate, else of its work; None where it has neither."""
    known = [quantity_of(name) for name, v in values.items() if type(v) in (int, float)]
    for kind in ("rate", "work"):
        if units := [q.unit for q in known if q.kind == kind]:
            return wanted if wanted in units else units[0]
    return None


_FIELD = {"step_time": "time_s", "data_wait": "data_wait_s", "memory": "memory_mib"}


def _over_ranks(value: float, quantity: Quantity, of_one: bool, ranks: int | None) -> float | None:
    """A rate or work of all ranks; None where it is of one and their number is not known."""
    if quantity.unit == "steps" or not (of_one or quantity.per_rank):
        return value  # every rank takes the same steps
    return value * ranks if ranks else None


def _plain(name: str, text: str) -> Any:
    """The text of a group as a number where it is one, None for NaN and infinity."""
    word = text.strip().strip("'\"").rstrip(",")
    times = _TIMES.get("k" if word[-1:] == "K" else word[-1:])
    if times and quantity_of(name).kind in ("rate", "work") and _NUMBER.fullmatch(word[:-1]):
        return _plain(name, word[:-1]) * times
    if _NUMBER.fullmatch(word):
        bare = word.replace(",", "").replace("_", "")
        return int(bare) if bare.lstrip("+-").isdigit() and len(bare) < 19 else float(bare)
    if word.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return None
    return word
