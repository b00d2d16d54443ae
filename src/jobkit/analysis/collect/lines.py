"""Observations from what a program printed: lines by a pattern, or [METRIC] key=value lines.

A log may have more than one training in it, and each line more than once. Where the index of the
steps falls back and the speed is another, the lines before it alone are read, and it is said.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any, BinaryIO

from jobkit.analysis.collect.steps import WITH_START, Observation, Observed
from jobkit.analysis.tables.text import counted
from jobkit.metric import pattern as patterns
from jobkit.metric.kinds import Record, number
from jobkit.outcome.evidence import START_MARK

METRIC_LINES = "metric lines"  # the source of key=value lines
SAME_SPEED = 1.05  # times as slow at most: other ranks' lines, or those after a restart
SLOW = 5  # times the median: a step with an evaluation or a checkpoint in it
ATTEMPT = re.compile(rf"{re.escape(START_MARK)}: attempt ([0-9]{{1,9}})\b")
Matches = Iterator[tuple[int, Mapping[str, str]]]  # of each line the attempt and its groups' texts
_OWN_KEYS = frozenset(("rank", "attempt", "kind", "run_id", "study", "t", "seq"))
_FIELD = {"step_time": "time_s", "data_wait": "data_wait_s", "memory": "memory_mib"}


def matches(stream: BinaryIO, pattern: patterns.Pattern) -> Matches:
    """Each line of a log that the pattern finds.

    The end of a log without its newline is no match: its last number may lack digits.
    """
    expressions = [re.compile(text) for text in pattern.lines]
    attempt = 0
    for line, whole in patterns.lines_of(stream):
        if mark := ATTEMPT.search(line):
            attempt = int(mark[1])
        match = next(filter(None, (e.search(line) for e in expressions)), None)
        if match and (whole or match.end() < len(line)):
            yield attempt, {k: text for k, text in match.groupdict().items() if text}


def observed_lines(
    lines: Matches, pattern: patterns.Pattern, ranks: int | None, planned: Mapping[str, Any]
) -> Observed | None:
    """The observations of the lines of a pattern; None where no line says a time or rate.

    ranks: how many a rate of one rank is multiplied by. planned: unit, work_per_step, warmup_steps.
    """
    seen, unread, evaluated = list[Observation](), list[str](), False
    source, of_one = f"pattern {pattern.name}", pattern.of == "per_rank"
    for attempt, groups in lines:
        values = {name: patterns.read_value(text, name) for name, text in groups.items()}
        measures = [name for name in values if patterns.quantity_of(name).kind in patterns.MEASURES]
        if bad := next((name for name in measures if not patterns.is_above_0(values[name])), ""):
            unread.append(f"{bad}={groups[bad].strip()}")
        line = _observation(values, ranks, planned.get("unit"), of_one)
        seen.append(replace(line, attempt=attempt, evaluated=evaluated))
        evaluated = not measures
    first, doubts = _first_training(seen, ranks, source)
    steps = _with_steps(first, planned, pattern.spans == "step")
    not_taken, warm = list[str](), [o for o in steps if not o.warmup]
    if pattern.spans == "running":
        steps = [replace(line, warmup=False) for line in steps[-1:]]
    elif len(warm) > 1 and 2 * sum(o.evaluated for o in warm) <= len(warm) + 1:
        steps = [replace(o, warmup=o.warmup or o.evaluated) for o in steps]
    elif warm and any(o.evaluated for o in warm):
        what = "one without a time, as of an evaluation: if it is in the time, log more often"
        not_taken.append(f"before most lines of {source} stands {what}")
    if unread:
        count = f"{counted(len(unread), 'line')} of {source}"
        why = f"with a time or rate that is no number above 0, as {unread[0][:80]}"
        not_taken.append(f"{count} {why}: that value is not used")
    not_taken += doubts
    if pattern.spans == "step":
        times = [o.time_s or (1 / o.rate if o.rate else 0) for o in steps if not o.warmup]
        usual = median(times) if times else 0
        slow = [t for t in times if t > SLOW * usual]
        if sum(slow) > 0.05 * (sum(times) - sum(slow)):
            count = f"{counted(len(slow), 'line')} of {source}"
            why = f"with a step of over {SLOW} times the median, as with an evaluation in it"
            not_taken.append(f"{count} {why}: the mean has them")
    source += f" ({pattern.contains})" * bool(pattern.contains)
    source += f", {WITH_START}" * (pattern.spans == "running")
    return _in_one_unit(steps, planned, source, not_taken)


def observed_metrics(
    records: Sequence[Record], ranks: int | None, planned: Mapping[str, Any]
) -> Observed | None:
    """The observations of [METRIC] key=value lines that say a time or a rate.

    Rank 0's count where ranks are named, and no others. Where all ranks print a rate of which the
    name does not say that it is of one rank, it may be of one or of all: then it is not used.
    """
    lines = [r for r in records if "v" not in r]
    own = [r for r in lines if number(r.get("rank")) in (None, 0)]
    if any(map(patterns.observes, lines)) and not any(map(patterns.observes, own)):
        return Observed(source=METRIC_LINES, not_taken=["no line of rank 0 has a time or rate"])
    seen = list[Observation]()
    for line in own:
        values = {name: value for name, value in line.items() if name not in _OWN_KEYS}
        attempt = at if type(at := line.get("attempt")) is int else 0
        seen.append(replace(_observation(values, ranks, planned.get("unit")), attempt=attempt))
    first, not_taken = _first_training(seen, ranks, "[METRIC]")
    steps = (line for line in lines if type(line.get("step")) is int)
    copies = Counter((r.get("epoch"), r["step"], *sorted(r.keys() - {"rank"})) for r in steps)
    often = median_low(copies.values()) if copies else 1
    kinds = [patterns.quantity_of(name) for line in lines for name in line]
    unclear = any(q.kind == "rate" and q.unit != "steps" and not q.per_rank for q in kinds)
    if ranks and ranks > 1 and often >= ranks and unclear:
        why = f"each rate is printed {often} times, as by all {ranks} ranks, and may be of one"
        fix = "Print it on rank 0 alone, or name it as tokens_per_s_per_rank"
        not_taken.append(f"{why} or of all: not used. {fix}")
        first = [replace(o, rate=None, work=None) for o in first if o.time_s]
    return _in_one_unit(_with_steps(first, planned, False), planned, METRIC_LINES, not_taken)


def _observation(
    values: Mapping[str, Any], ranks: int | None, wanted: str | None, of_one: bool = False
) -> Observation:
    """One line as an observation of one step.

    Of several rates the first one in the wanted unit counts, else the first, and work in its unit;
    steps per second are a time. A number that cannot be one of its quantity, as a rate of -1 or 0,
    says that it is not known.
    """
    fields, free = dict[str, Any](), dict[str, Any]()
    amounts: list[tuple[patterns.Quantity, float]] = []
    for name, value in values.items():
        quantity = patterns.quantity_of(name)
        if (kind := quantity.kind) == "free" or type(value) not in (int, float):
            free[quantity.name or name] = value
        elif kind == "step":
            fields["step"] = int(value) if float(value).is_integer() else None
        elif kind == "epoch":
            fields["epoch"] = value
        elif not (patterns.is_above_0(value) or (kind == "data_wait" and value == 0)):
            continue
        elif kind == "rate" and quantity.unit == "steps":  # every rank takes the same ones
            fields.setdefault("time_s", 1 / (value * quantity.scale))
        elif kind in ("rate", "work"):
            amounts.append((quantity, value * quantity.scale))
        else:
            fields[_FIELD[kind]] = value * quantity.scale
    units = [q.unit for q, _ in amounts if q.kind == "rate"] or [q.unit for q, _ in amounts]
    unit = wanted if wanted in units else next(iter(units), None)
    for quantity, value in amounts:
        if quantity.unit == unit:  # of one rank, and their number is not known: None
            over = ranks if of_one or quantity.per_rank else 1
            fields.setdefault(quantity.kind, value * over if over else None)
    return Observation(**fields, unit=unit, values=free)


def _first_training(
    lines: Sequence[Observation], ranks: int | None, source: str
) -> tuple[list[Observation], list[str]]:
    """The observations that say a time or a rate, each step once; a sentence on others.

    Where the index of the steps falls back a second training may begin: at another speed they end
    there. At the same one it is this training, of other ranks or after a restart. Lines of several
    ranks overtake each other by a step or two, and of the lines of a step the first counts.
    """
    measured = [line for line in lines if line.time_s or line.rate]
    newest: list[tuple[float, ...]] = []  # how far the training was, at most
    overtaking = 1 if ranks == 1 else 3
    later: list[Observation] = []
    # Other lines, as of an evaluation, may have an index of their own.
    for line in [o for o in measured if o.step is not None] or lines:
        if line.step is not None or line.epoch is not None:
            at = line.attempt, -1 if line.epoch is None else line.epoch, line.step or 0
            if len(newest) == overtaking and at < newest[0]:
                end = next(n for n, other in enumerate(lines) if other is line)
                later = [o for o in lines[end:] if o.time_s or o.rate]
                break
            newest = sorted({*newest, at})[-overtaking:]
    before = measured[: len(measured) - len(later)]
    if later and not before:
        return later, [f"the rate is of the second training in this log: {source} has no other"]
    if later:
        fast, slow = sorted(  # the median time of a step, without the first line
            median(o.time_s or 1 / (o.rate or 1) for o in (part[1:] or part))
            for part in (before, later)
        )
        if slow <= SAME_SPEED * fast:
            before, later = measured, []
    by_step: dict[object, list[Observation]] = defaultdict(list)
    for place, line in enumerate(before):
        key = place if line.step is None else (line.attempt, line.epoch, line.step)
        by_step[key].append(line)
    doubts, apart = list[str](), list[float]()
    for same in by_step.values():  # at another speed, and not by most ranks: of another training
        few = len(same) > 1 and (2 * len(same) < (ranks or 0) or len(same) == 2 != ranks)
        if few and len({(o.time_s is None, o.unit) for o in same}) == 1:
            speeds = [o.time_s or o.rate or 1 for o in same]
            apart.append(max(speeds) / min(speeds))
    if apart and (slow := median_low(apart)) > SAME_SPEED:
        doubts.append(
            f"{counted(len(apart), 'step')} of {source} with several lines, of which one takes "
            f"{slow:.3g} times another: the first counts. Does the log have a second training?"
        )
    # More lines of a step than there are ranks, and no copies: of another epoch or training.
    again = [same for same in by_step.values() if ranks and len(same) > ranks]
    unused = len(later) or sum(len(same) - 1 for same in again if any(o != same[0] for o in same))
    if unused:
        doubts.append(
            f"{counted(unused, 'line')} of {source} with the index of an earlier step are not "
            "used. Where the index begins again in each epoch, name the epoch's group epoch; else "
            "it is a second training in this log"
        )
    return [same[0] for same in by_step.values()], doubts


def _with_steps(
    lines: Iterable[Observation], planned: Mapping[str, Any], single: bool
) -> list[Observation]:
    """The observations of a log's lines with the number of their steps, and the warm-up marked.

    A line's time is that of one step. Unless it is of this step alone (single), it holds for every
    step since the line before. The first line of an attempt has the start-up in it and counts as
    warm-up, and so does every one within warmup_steps of it, until the index begins again.
    """
    observations: list[Observation] = []
    before: Observation | None = None
    warm_until = 0
    for line in lines:
        first = before is None or before.attempt != line.attempt
        if first:
            warm_until = (line.step or 0) + (planned.get("warmup_steps") or 0)
        steps = 1 if single else None  # None: the lines do not say
        if before and not first and before.step is not None and line.step is not None:
            again = line.epoch != before.epoch and line.step <= before.step  # in another epoch
            warm_until = -1 if again else warm_until
            if not single:
                steps = max(1, line.step - (0 if again else before.step))
        early = line.step is not None and line.step <= warm_until
        parts = ((k, getattr(line, k)) for k in ("time_s", "data_wait_s", "work"))
        times = {k: value and value * (steps or 1) for k, value in parts}
        observations.append(replace(line, steps=steps, warmup=first or early, **times))
        before = line
    return observations


def _in_one_unit(
    steps: Sequence[Observation], planned: Mapping[str, Any], source: str, doubts: Sequence[str]
) -> Observed | None:
    """The observations in one unit: of those in another one the times alone remain."""
    if not (steps or doubts):
        return None
    unit, per_step = planned.get("unit"), planned.get("work_per_step")
    units = Counter(o.unit for o in steps if o.unit)
    stated = unit and per_step and any(o.time_s for o in steps)
    if units and unit not in units and not stated:
        per_step = None if unit else per_step
        unit = units.most_common(1)[0][0]
    steps = [o if o.unit in (None, unit) else replace(o, rate=None, work=None) for o in steps]
    return Observed(steps=steps, unit=unit, work_per_step=per_step, source=source, not_taken=doubts)
