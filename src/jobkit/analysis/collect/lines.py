"""Observations from what a program printed: lines by a pattern, or [METRIC] key=value lines.

A log may have more than one training in it, and each line more than once. Where the index of the
steps falls back at another speed, the first training alone is read, and it is said.
"""

import bisect
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, BinaryIO

import regex

from jobkit.analysis.collect.steps import Observation, Observed
from jobkit.analysis.tables.text import counted
from jobkit.errors import ANSI, UsageError
from jobkit.metric.kinds import Record
from jobkit.metric.pattern import Pattern, Quantity, quantity_of
from jobkit.outcome.evidence import START_MARK

METRIC_LINES = "metric lines"  # the source of key=value lines
LONGEST_LINE = 8192  # characters of a line that a pattern is tried on
TIMEOUT_S = 2.0  # of one expression on one line
CUT: Mapping[str, str] = {}  # the groups of a line that may have lost its end
SAME_SPEED = 1.05  # a training again is one of another speed beyond this factor
SLOW = 5  # times the median: a step with an evaluation or a checkpoint in it
_ENDS_IN_NUMBER = re.compile(r"[0-9][0-9.]*(?:[eE][+-]?)?\Z")
_ATTEMPT = re.compile(rf"{re.escape(START_MARK)}: attempt ([0-9]{{1,9}})\b")
# A comma or _ divides thousands. A decimal comma is not read: 0,031 is no number.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:_[0-9]{3})+)|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)
_WRAPPED = re.compile(r"(?:np|numpy|torch|tensor)[\w.]*\((.*)\)")  # as np.float32(1.25)
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_TIMES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}  # behind a rate or work: 12.3k
_MEASURES = ("step_time", "rate")
_OWN_KEYS = frozenset(("rank", "attempt", "kind", "run_id", "study", "t", "seq"))
_FIELD = {"step_time": "time_s", "data_wait": "data_wait_s", "memory": "memory_mib"}
_Mark = tuple[float, ...]  # how far a training was at a line: attempt, epoch, step


def matches(stream: BinaryIO, pattern: Pattern) -> Iterator[tuple[int, int, Mapping[str, str]]]:
    """Each line of a log that the pattern finds: attempt, number of the line, its groups' texts.

    CUT stands for the groups of a line whose last number may have lost its end. Raises UsageError
    where an expression takes longer than TIMEOUT_S on a line.
    """
    expressions = [regex.compile(text) for text in pattern.lines]
    attempt = 0
    for place, line, whole in _lines(stream):
        if mark := _ATTEMPT.search(line):
            attempt = int(mark[1])
        for expression in expressions:
            try:
                match = expression.search(line, timeout=TIMEOUT_S)
            except TimeoutError:
                raise UsageError(
                    f"pattern {pattern.name}: took longer than {TIMEOUT_S:g} s on line {place}"
                ) from None
            if match:
                cut = not whole and match.end() == len(line) and _ENDS_IN_NUMBER.search(line)
                groups = {name: text for name, text in match.groupdict().items() if text}
                yield attempt, place, CUT if cut else groups
                break


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str, bool]]:
    """The lines of a log without colours; a progress bar's steps are lines too.

    The last value: whether a line has its end.
    """
    text = io.TextIOWrapper(stream, "utf-8", "replace", newline="\n")
    place = 1
    while line := text.readline(1 << 20):
        *bars, last = line.rstrip("\r\n").split("\r")
        for part, whole in (*((bar, True) for bar in bars), (last, line.endswith("\n"))):
            if part:
                yield place, ANSI.sub("", part)[:LONGEST_LINE], whole
        place += line.endswith("\n")


def observed_lines(
    lines: Iterable[tuple[int, int, Mapping[str, str]]],
    pattern: Pattern,
    ranks: int | None,
    planned: Mapping[str, Any],
) -> Observed | None:
    """The observations of the lines of a pattern; None where no line says a time or rate.

    lines: as matches gives them. ranks: how many a rate of one rank is multiplied by. planned:
    unit, work_per_step and warmup_steps of the study.
    """
    seen: list[tuple[Observation, _Mark | None]] = []
    cut, unread, source = 0, list[str](), f"pattern {pattern.name}"
    for attempt, _, groups in lines:
        cut += groups is CUT
        values = {name: plain(text, name) for name, text in groups.items()}
        measures = (name for name in values if quantity_of(name).kind in _MEASURES)
        bad = [name for name in measures if not _is_above_0(values[name])]
        unread += [f"{name}={groups[name].strip()}" for name in bad[:1]]
        line = _observation(values, pattern.of == "per_rank", ranks, planned.get("unit"))
        seen.append((replace(line, attempt=attempt), _mark(attempt, values)))
    first, doubts = _first_training(seen, ranks, source)
    once, repeated = _each_once(first, ranks)
    single = pattern.spans == "step"
    steps = _of_lines(once, planned, single)
    not_taken = []
    if cut:
        not_taken.append(f"{counted(cut, 'line')} of {source} may be truncated: not used")
    if unread:
        not_taken.append(
            f"{counted(len(unread), 'line')} of {source} with a time or rate that is no number "
            f"above 0, as {unread[0][:80]}: that value is not used"
        )
    not_taken += doubts or ([_of_earlier(repeated, source)] if repeated else [])
    if single:
        not_taken += _slow_steps(steps, source)
    elif pattern.spans == "running" and steps:
        steps = [replace(steps[-1], warmup=False)]
    return _in_one_unit(steps, planned, source, not_taken, single)


def _slow_steps(steps: Sequence[Observation], source: str) -> list[str]:
    """A sentence where a few of the printed steps are so long that they weigh too much."""
    times = [o.step_s or (1 / o.rate if o.rate else 0) for o in steps if not o.warmup]
    slow = [t for t in times if t > SLOW * median(times)]
    if not slow or sum(times) < SAME_SPEED * (sum(times) - sum(slow)):
        return []
    lines = f"{counted(len(slow), 'line')} of {source} with a step of over {SLOW} times the median"
    return [f"{lines}, as with an evaluation in it: the mean has them"]


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def observed_metrics(
    records: Sequence[Record], ranks: int | None, planned: Mapping[str, Any], copies: int = 1
) -> Observed | None:
    """The observations of [METRIC] key=value lines that say a time or a rate, and no epoch.

    copies: how often the line of a step was printed. Where all ranks print a rate of which the name
    does not say that it is of one rank, it may be of one or of all: then it is not used.
    """
    seen = [
        (_of_record(record, ranks, planned.get("unit")), _mark(0, record))
        for record in records
        if "v" not in record and not ("epoch" in record and "step" not in record)
    ]
    first, not_taken = _first_training(seen, ranks, "[METRIC]")
    kinds = [quantity_of(name) for record in records for name in record]
    unclear = any(q.kind == "rate" and q.unit != "steps" and not q.per_rank for q in kinds)
    if ranks and ranks > 1 and copies >= ranks and unclear:
        not_taken.append(
            f"each rate is printed {copies} times, as by all {ranks} ranks, and may be of one or "
            "of all: not used. Print it on rank 0 alone, or name it as tokens_per_s_per_rank"
        )
        first = [replace(o, rate=None, work=None) for o in first]
    timed = [o for o in _each_once(first, ranks)[0] if o.time_s or o.rate]
    return _in_one_unit(_of_lines(timed, planned, False), planned, METRIC_LINES, not_taken)


def observes(record: Record) -> bool:
    """Whether a key=value line says a time or a rate of steps."""
    line = _of_record(record, 1)
    return bool(line.time_s or line.rate)


def _of_record(record: Record, ranks: int | None, wanted: str | None = None) -> Observation:
    values = {k: v for k, v in record.items() if k not in _OWN_KEYS}
    return _observation(values, False, ranks, wanted)


# More than one training in a log, and more than one line of a step.


def _mark(attempt: int, values: Mapping[str, Any]) -> _Mark | None:
    """How far the training was at a line; None where it does not say it."""
    places = {quantity_of(name).kind: v for name, v in values.items() if type(v) in (int, float)}
    if not {"step", "epoch"} & places.keys():
        return None
    return (attempt, places.get("epoch", -1), places.get("step", -1))


def _restart(marks: Sequence[_Mark | None], ranks: int | None) -> int | None:
    """Where the training that the lines are of begins again; None where it does not.

    Lines of several ranks overtake each other by a step or two.
    """
    seen: list[_Mark] = []  # sorted, without copies
    for place, mark in enumerate(marks):
        if mark is None:
            continue
        index = bisect.bisect_right(seen, mark)
        if len(seen) - index >= (1 if ranks == 1 else 3):
            return place
        if not index or seen[index - 1] != mark:
            seen.insert(index, mark)
    return None


def _first_training(
    seen: Sequence[tuple[Observation, _Mark | None]], ranks: int | None, source: str
) -> tuple[list[Observation], list[str]]:
    """The observations that say a time or a rate, of the first training; what others there are.

    Lines again at the same speed are those of other ranks, or of the same training after a restart.
    """
    place = _restart([mark for _, mark in seen], ranks)
    measured = [o for o, _ in seen if o.time_s or o.rate]
    first = [o for o, _ in seen[:place] if o.time_s or o.rate]
    later = measured[len(first) :]
    if place is None or not later:
        return measured, []
    if not first:
        return later, [f"the rate is of the second training in this log: {source} has no other"]
    fast, slow = sorted(  # the median time of a step, without the first line
        median(o.time_s or 1 / (o.rate or 1) for o in (part[1:] or part)) for part in (first, later)
    )
    if slow <= SAME_SPEED * fast:
        return measured, []
    return first, [_of_earlier(len(later), source)]


def _of_earlier(count: int, source: str) -> str:
    return (
        f"{counted(count, 'line')} of {source} with the index of an earlier step are not used. "
        "Where the index begins again in each epoch, name the epoch's group epoch; else it is a "
        "second training in this log"
    )


def _each_once(lines: Iterable[Observation], ranks: int | None) -> tuple[list[Observation], int]:
    """The observations without those of a step that another rank has printed too.

    Returned too: how many of those left out are of a step that more lines say than there are ranks.
    """
    first: dict[object, Observation] = {}
    counts: Counter[object] = Counter()
    copies: Counter[object] = Counter()
    for place, line in enumerate(lines):
        key = place if line.step is None else (line.attempt, line.epoch, line.step)
        counts[key] += 1
        copies[key] += first.setdefault(key, line) == line
    over = (n - 1 for key, n in counts.items() if ranks and n > ranks and copies[key] < n)
    return list(first.values()), sum(over)


def _of_lines(
    lines: Sequence[Observation], planned: Mapping[str, Any], single: bool
) -> list[Observation]:
    """The observations of a log's lines with the number of their steps, and the warm-up marked.

    A line's time is that of one step. Unless it is of this step alone (single), it holds for every
    step since the line before. The first line of an attempt has the start-up in it and counts as
    warm-up, and so does every one within warmup_steps of it, until the index begins again.
    """
    warmup = planned.get("warmup_steps")
    warmup = warmup if type(warmup) is int else 0
    observations: list[Observation] = []
    begun: dict[int, int] = {}  # by attempt: its first step
    again = set[int]()  # attempts in which the index began again, with an epoch
    for before, line in pairwise([None, *lines]):
        assert line is not None
        first, new_epoch = line.attempt not in begun, _new_epoch(before, line)
        start = begun.setdefault(line.attempt, line.step or 0)
        if new_epoch:
            again.add(line.attempt)
        early = line.step is not None and line.step <= start + warmup
        steps = 1 if single else None  # None: the lines do not say
        if not (single or first or before is None or before.step is None or line.step is None):
            steps = max(1, line.step - (0 if new_epoch else before.step))
        times: dict[str, Any] = {
            name: value * (steps or 1)
            for name in ("time_s", "data_wait_s", "work")
            if (value := getattr(line, name)) is not None
        }
        is_warmup = first or (early and line.attempt not in again)
        observations.append(replace(line, steps=steps, warmup=is_warmup, **times))
    return observations


def _new_epoch(before: Observation | None, line: Observation) -> bool:
    """Whether the index of the step has begun again, since another epoch has begun."""
    if before is None or before.step is None or line.step is None:
        return False
    same = (before.attempt, before.epoch) == (line.attempt, line.epoch)
    return not same and before.attempt == line.attempt and line.step <= before.step


# One line as an observation.


def _in_one_unit(
    steps: Sequence[Observation],
    planned: Mapping[str, Any],
    source: str,
    not_taken: Sequence[str],
    single: bool = False,
) -> Observed | None:
    """The observations in one unit: of those in another one the times alone remain."""
    if not (steps or not_taken):
        return None
    unit, per_step = planned.get("unit"), planned.get("work_per_step")
    if any(o.unit == "steps" for o in steps):
        steps = [_in_steps(o) for o in steps]
    if per_step:
        steps = [
            replace(o, rate=o.rate * per_step, unit=unit) if o.unit == "steps" and o.rate else o
            for o in steps
        ]
    units = Counter(o.unit for o in steps if o.unit)
    timed = per_step and any(o.time_s for o in steps)
    if units and unit not in units and not (unit and timed):
        per_step = None if unit else per_step
        unit = units.most_common(1)[0][0]
    steps = [o if o.unit in (None, unit) else replace(o, rate=None, work=None) for o in steps]
    return Observed(
        steps=steps,
        unit=unit,
        work_per_step=per_step,
        single=single,
        source=source,
        not_taken=not_taken,
    )


def _in_steps(line: Observation) -> Observation:
    """A line with its rate in steps and its time: a progress bar says it/s or s/it."""
    count = line.steps or 1
    if line.rate is None and line.time_s:
        return replace(line, rate=count / line.time_s, unit="steps")
    if line.time_s is None and line.rate and line.unit == "steps":
        return replace(line, time_s=count / line.rate)
    return line


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
    free = type(value) not in (int, float) or kind in ("free", "step", "epoch")
    return free or _is_above_0(value) or (kind == "data_wait" and value == 0)


def _unit(values: Mapping[str, Any], wanted: str | None) -> str | None:
    """The unit of a line's rate, else of its work; None where it has neither."""
    known = [quantity_of(name) for name, v in values.items() if type(v) in (int, float)]
    for kind in ("rate", "work"):
        if units := [q.unit for q in known if q.kind == kind]:
            return wanted if wanted in units else units[0]
    return None


def _over_ranks(value: float, quantity: Quantity, of_one: bool, ranks: int | None) -> float | None:
    """A rate or work of all ranks; None where it is of one and their number is not known."""
    if quantity.unit == "steps" or not (of_one or quantity.per_rank):
        return value  # every rank takes the same steps
    return value * ranks if ranks else None


def with_numbers(record: Record) -> Record:
    """A key=value line with the numbers that its texts are, as 1,234.5 or np.float32(1.25).

    Where a comma in it is a decimal one, as in 3,1, none is read: 255,836 may be 255.836.
    """
    texts = {k: v for k, v in record.items() if isinstance(v, str) and ("," in v or "(" in v)}
    if any(_DECIMAL_COMMA.fullmatch(v) and not _NUMBER.fullmatch(v) for v in texts.values()):
        return record
    return record | {k: plain(v, k) for k, v in texts.items()}


def plain(text: str, name: str = "") -> Any:
    """A text as a number where it is one, None for NaN and infinity.

    name: of the value; behind a rate k, M and G are factors.
    """
    word = text.strip().strip("'\"").rstrip(",")
    if wrapped := _WRAPPED.fullmatch(word):
        word = wrapped[1]
    times = _TIMES.get(word[-1:]) if quantity_of(name).kind in ("rate", "work") else None
    if times and _NUMBER.fullmatch(word[:-1]):
        return plain(word[:-1]) * times
    if _NUMBER.fullmatch(word):
        bare = word.replace(",", "").replace("_", "")
        return int(bare) if bare.lstrip("+-").isdigit() and len(bare) < 19 else float(bare)
    if word.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return None
    return word
