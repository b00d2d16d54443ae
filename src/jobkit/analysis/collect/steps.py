"""Steps of a run as they were observed, and the rate that follows from them.

An observation is some optimizer steps over all ranks: a window of the meter, one line of a
program's own log, or one [METRIC] key=value line. Whatever it came from, the rate is made here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from jobkit.analysis.tables.frames import Row

MOST_ROWS = 1000  # of one run in steps.csv
IN_STEPS = "steps/s"  # the unit of a rate whose work is not known
NO_UNIT = "units"  # of work that is counted or stated without a unit
TRAINING = "training"  # jobkit's own, whose rate is that of its epochs
PERCENTILES = ("step_p50_s", "step_p95_s", "step_p99_s", "step_max_s")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Some steps of a run. None: not known."""

    attempt: int = 0
    step: int | None = None  # index of the last step, from 1
    epoch: int | None = None
    steps: int | None = None  # how many
    time_s: float | None = None  # of all of them, slowest rank, without pauses
    work: float | None = None  # units of work over all ranks
    rate: float | None = None  # units of work per second over all ranks, where a line says it
    unit: str | None = None  # of this rate or work, as the line names it
    data_wait_s: float | None = None
    memory_mib: float | None = None
    warmup: bool = False
    percentiles: dict[str, float] = field(default_factory=dict)  # of single steps: PERCENTILES
    values: dict[str, Any] = field(default_factory=dict)  # free columns


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The observations of a run, and what is known of all of them."""

    steps: Sequence[Observation] = ()
    unit: str | None = None  # of work: images, samples, tokens
    work_per_step: float | None = None  # over all ranks
    single: bool = False  # an observation is one step of several: they have a median
    windows: bool = False  # an observation is a window of the meter, of known beginning and end
    source: str = ""  # meter, auto, pattern NAME, metric lines, TRAINING
    work_source: str | None = None  # of the windows' work: stated, computed, counted, inferred
    # Lines of a pattern that are not taken, or not wholly:
    cut: int = 0  # their last number may have lost its end
    unread: Sequence[str] = ()  # a time or rate in each that is no number above 0, as NAME=TEXT
    repeated: int = 0  # of a step that more lines say than there are ranks
    others: Sequence[str] = ()  # the same of a pattern in whose place this was taken, in words


def rate_row(observed: Observed) -> Row:
    """The columns of results.csv about the steps; empty where no time and no rate was observed.

    Single steps give the median, since an evaluation or a checkpoint may stand between two of
    them; windows and intervals give the sum of the work over the sum of the times.
    """
    timed = [o for o in observed.steps if _step_time(o) is not None or o.rate]
    timed = [o for o in timed if not o.warmup] or timed
    if not timed:
        return {}
    times = [t for o in timed if (t := _step_time(o)) is not None]
    step_s = (median(times) if observed.single else _mean_step(timed)) if times else None
    rate, unit = _rate(observed, timed, step_s)
    row: Row = {
        "throughput": rate,
        "throughput_unit": f"{unit}/s",
        "throughput_source": observed.source,
        "work_source": None if unit == "steps" else observed.work_source,
        "step_time_s": step_s,
        "steps_timed": sum(o.steps or 1 for o in timed),
        "data_wait_share": _share(timed),
        "peak_memory_mib": max((o.memory_mib for o in timed if o.memory_mib), default=None),
    }
    warm = [o for o in timed if not o.warmup]  # all of them, or none
    row |= _percentiles(warm, times if observed.single and warm else [])
    return {k: v for k, v in row.items() if v is not None}


def _rate(
    observed: Observed, timed: Sequence[Observation], step_s: float | None
) -> tuple[float | None, str]:
    """The rate over all ranks and its unit: as said, from the work, else in steps."""
    unit = observed.unit or NO_UNIT
    said = [o for o in timed if o.rate]
    if said and observed.single:
        return median(o.rate for o in said if o.rate), unit
    if said:  # the mean over equal numbers of steps is the harmonic one
        steps = [o.steps or 1 for o in said]
        return sum(steps) / sum(
            n / o.rate for n, o in zip(steps, said, strict=True) if o.rate
        ), unit
    counted = [o for o in timed if o.work is not None and o.time_s]
    if counted and not observed.single:
        return sum(o.work or 0 for o in counted) / sum(o.time_s or 0 for o in counted), unit
    per_step = observed.work_per_step or _work_per_step(counted)
    if not step_s:
        return None, unit
    return (per_step / step_s, unit) if per_step else (1 / step_s, "steps")


def _work_per_step(counted: Sequence[Observation]) -> float | None:
    """The median work of a step, over all ranks."""
    return median((o.work or 0) / (o.steps or 1) for o in counted) if counted else None


def _step_time(one: Observation) -> float | None:
    """Seconds per step of an observation."""
    return one.time_s / (one.steps or 1) if one.time_s and one.time_s > 0 else None


def _mean_step(timed: Sequence[Observation]) -> float:
    known = [o for o in timed if _step_time(o) is not None]
    return sum(o.time_s or 0 for o in known) / sum(o.steps or 1 for o in known)


def _share(timed: Sequence[Observation]) -> float | None:
    """The share of the time that was spent waiting for data."""
    known = [o for o in timed if o.data_wait_s is not None and o.time_s]
    total = sum(o.time_s or 0 for o in known)
    return min(1.0, sum(o.data_wait_s or 0 for o in known) / total) if total else None


def _percentiles(timed: Sequence[Observation], singles: list[float]) -> Row:
    """Percentiles of the time of one step: of the steps, else the median over the windows'.

    A window counts as often as it has steps.
    """
    if len(singles) >= 20:
        ordered = sorted(singles)
        places = zip(PERCENTILES, (0.5, 0.95, 0.99, 1.0), strict=True)
        return {name: ordered[min(len(ordered) - 1, int(p * len(ordered)))] for name, p in places}
    known = {name for o in timed for name in o.percentiles}
    return {name: _percentile(name, timed) for name in PERCENTILES if name in known}


def _percentile(name: str, windows: Sequence[Observation]) -> float:
    """A percentile over the windows that have it: one of them at least."""
    known = [(o.percentiles[name], o.steps or 1) for o in windows if name in o.percentiles]
    return over_windows(name, sorted(known))


def over_windows(name: str, values: Sequence[tuple[float, int]]) -> float:
    """A percentile over windows, from each one's and the number of its steps, sorted."""
    return values[-1][0] if name == "step_max_s" else _middle(values)


def _middle(values: Sequence[tuple[float, int]]) -> float:
    """The median of sorted values, each with the number of steps that it stands for."""
    half, seen = sum(n for _, n in values) / 2, 0
    for place, (value, steps) in enumerate(values):
        seen += steps
        if seen == half:  # between two
            return (value + values[place + 1][0]) / 2
        if seen > half:
            return value
    raise ValueError("no values")


def step_rows(observed: Observed) -> list[Row]:
    """The rows of steps.csv of one run, at most MOST_ROWS: neighbours are joined beyond it."""
    steps = list(observed.steps)
    size = -(-len(steps) // MOST_ROWS) or 1
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    row = {} if observed.source == TRAINING else rate_row(observed)
    unit = row.get("throughput_unit", f"{observed.unit or NO_UNIT}/s")
    return [_step_row(_joined(g) if len(g) > 1 else g[0], observed, unit) for g in groups]


def _step_row(one: Observation, observed: Observed, unit: str) -> Row:
    """A row of steps.csv; unit: of the run's rate, in steps where the work is not known."""
    work = one.work
    if work is None and observed.work_per_step is not None and one.steps:
        work = observed.work_per_step * one.steps
    rate = one.rate or (work / one.time_s if work is not None and one.time_s else None)
    if unit == IN_STEPS and (rate is None or observed.unit != "steps"):
        rate = one.steps / one.time_s if one.steps and one.time_s else None
    return {
        **one.values,
        "attempt": one.attempt,
        "step": one.step,
        "epoch": one.epoch,
        "steps": one.steps,
        "warmup": one.warmup,
        "time_s": one.time_s,
        "throughput": rate,
        "throughput_unit": unit,
        "data_wait_s": one.data_wait_s,
        **one.percentiles,
    }


def _joined(group: Sequence[Observation]) -> Observation:
    """Neighbouring observations as one: sums, the last step, the percentiles over them."""
    last = group[-1]

    def total(get: Callable[[Observation], float | None]) -> float | None:
        values = [get(o) for o in group]
        return None if None in values else sum(v for v in values if v is not None)

    time_s, work = total(lambda o: o.time_s), total(lambda o: o.work)
    steps = total(lambda o: o.steps)
    rates = [o.rate for o in group if o.rate]
    names = {name for o in group for name in o.percentiles}
    return Observation(
        attempt=last.attempt,
        step=last.step,
        epoch=last.epoch,
        steps=int(steps) if steps is not None else None,
        time_s=time_s,
        work=work,
        rate=len(rates) / sum(1 / r for r in rates) if rates else None,
        unit=last.unit,
        data_wait_s=total(lambda o: o.data_wait_s),
        warmup=all(o.warmup for o in group),
        percentiles={name: _percentile(name, group) for name in names},
        values=last.values,
    )


def each_once(
    found: Iterable[Observation], ranks: int | None = None
) -> tuple[list[Observation], int]:
    """The observations without those of a step that another rank has printed too.

    The index may begin again in each epoch. Returned too: how many of those left out are of a step
    that more lines say than there are ranks.
    """
    same: dict[object, list[Observation]] = defaultdict(list)
    for number, one in enumerate(found):
        place = ("line", number) if one.step is None else (one.attempt, one.epoch, one.step)
        same[place].append(one)
    counts = [len(lines) for lines in same.values()]
    repeated = sum(n - 1 for n in counts if ranks and n > ranks)
    return [lines[0] for lines in same.values()], repeated


def of_lines(found: Sequence[Observation], warmup_steps: int, single: bool) -> list[Observation]:
    """The observations of a log's lines with the number of their steps, and the warm-up marked.

    A line's time is that of one step. Unless it is of this step alone (single), it holds for every
    step since the line before. The first line of an attempt has the start-up in it and counts as
    warm-up, and so does every one within warmup_steps of it, until the index begins again.
    """
    made: list[Observation] = []
    begun: dict[int, int] = {}  # by attempt: its first step
    again = set[int]()  # attempts in which the index began again, with an epoch
    for before, one in pairwise([None, *found]):
        assert one is not None
        first = one.attempt not in begun
        start = begun.setdefault(one.attempt, one.step or 0)
        if _begins_again(before, one):
            again.add(one.attempt)
        early = one.step is not None and one.step <= start + warmup_steps
        early = early and one.attempt not in again
        steps = 1 if single else _steps_between(None if first else before, one)
        made.append(_over(one, steps, first or early))
    return made


def _steps_between(before: Observation | None, one: Observation) -> int | None:
    """How many steps an interval's line is of; None where the lines do not say."""
    if before is None or before.step is None or one.step is None:
        return None
    return max(1, one.step - (0 if _begins_again(before, one) else before.step))


def _begins_again(before: Observation | None, one: Observation) -> bool:
    """Whether the index of the step has begun again, since another epoch has begun."""
    if before is None or before.step is None or one.step is None:
        return False
    same = (before.attempt, before.epoch) == (one.attempt, one.epoch)
    return not same and before.attempt == one.attempt and one.step <= before.step


def _over(one: Observation, steps: int | None, warmup: bool) -> Observation:
    """An observation of one step's time as one of several steps."""

    def all_of(value: float | None) -> float | None:
        return None if value is None else value * (steps or 1)

    return replace(
        one,
        steps=steps,
        warmup=warmup,
        time_s=all_of(one.time_s),
        data_wait_s=all_of(one.data_wait_s),
        work=all_of(one.work),
    )
