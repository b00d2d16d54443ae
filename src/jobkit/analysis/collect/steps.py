"""Steps of a run as they were observed, the rate that follows from them, and their rows.

An observation is some optimizer steps over all ranks: windows of the meter, one line of a program's
own log, or one [METRIC] key=value line. Whatever it came from, the rate is made here: the work over
the time of all steps after the warm-up.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import IN_STEPS
from jobkit.metric.kinds import Record, number

MAX_ROWS = 1000  # of one run in steps.csv or samples.csv
WITH_START = "start-up included"  # what a source says whose rates are of whole runs
WARM_UP = "of the warm-up alone"  # likewise, where nothing else was measured
NO_UNIT = "units"  # of work that is counted or stated without a unit


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Some steps of a run. None: not known."""

    attempt: int = 0
    step: int | None = None  # index of the last step, from 1
    epoch: float | None = None
    steps: int | None = None  # how many
    time_s: float | None = None  # of all of them, above 0, slowest rank, without pauses
    work: float | None = None  # units of work over all ranks
    rate: float | None = None  # units of work per second over all ranks, where a line says it
    unit: str | None = None  # of this rate or work, as the line names it
    data_wait_s: float | None = None
    memory_mib: float | None = None
    warmup: bool = False
    evaluated: bool = field(default=False, compare=False)  # an evaluation may be in its time
    values: dict[str, Any] = field(default_factory=dict)  # free columns


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The observations of a run, and what is known of all of them."""

    steps: Sequence[Observation] = ()
    unit: str | None = None  # of work: images, samples, tokens
    work_per_step: float | None = None  # over all ranks
    windows: bool = False  # an observation is a window of the meter, of known beginning and end
    source: str = ""  # meter, auto, pattern NAME, metric lines
    work_source: str | None = None  # of the windows' work: stated, counted, inferred
    not_taken: Sequence[str] = ()  # sentences on kinds of lines that are not used, or doubtful


def rate_row(observed: Observed) -> Row:
    """The columns of results.csv about the steps; empty where no time and no rate was observed."""
    timed = [o for o in observed.steps if o.time_s or o.rate]
    timed = [o for o in timed if not o.warmup] or timed
    if not timed:
        return {}
    with_time = [o for o in timed if o.time_s]
    steps, time_s = _sum(with_time, "steps"), _sum(with_time, "time_s")
    step_time_s = time_s / steps if steps else None
    rate, unit = _rate(observed, timed, step_time_s)
    row: Row = {
        "throughput": rate,
        "throughput_unit": f"{unit}/s",
        "throughput_source": observed.source + f", {WARM_UP}" * all(o.warmup for o in timed),
        "work_source": None if unit == "steps" else observed.work_source,
        "step_time_s": step_time_s,
        "peak_memory_mib": max((o.memory_mib for o in timed if o.memory_mib), default=None),
    }
    if waited := [o for o in with_time if o.data_wait_s is not None]:
        row["data_wait_share"] = min(1.0, _sum(waited, "data_wait_s") / _sum(waited, "time_s"))
    return {k: v for k, v in row.items() if v is not None}


def _sum(observations: Iterable[Observation], name: str) -> float:
    """The sum of a field; steps whose number no line says count as one."""
    return sum(getattr(o, name) or (name == "steps") for o in observations)


def _rate(
    observed: Observed, timed: Sequence[Observation], step_s: float | None
) -> tuple[float | None, str]:
    """The rate over all ranks and its unit: as the lines say it, from the work, else in steps."""
    unit = observed.unit or NO_UNIT
    rated = [(o.steps or 1, o.rate) for o in timed if o.rate]
    if rated:  # the mean over equal numbers of steps is the harmonic one
        return sum(n for n, _ in rated) / sum(n / rate for n, rate in rated), unit
    if counted := [o for o in timed if o.work is not None and o.time_s]:
        return _sum(counted, "work") / _sum(counted, "time_s"), unit
    if not step_s:
        return None, unit
    per_step = observed.work_per_step
    return (per_step / step_s, unit) if per_step else (1 / step_s, "steps")


def step_rows(observed: Observed) -> list[Row]:
    """The rows of steps.csv of one run."""
    unit = rate_row(observed).get("throughput_unit", f"{observed.unit or NO_UNIT}/s")
    names = ("attempt", "step", "epoch", "steps", "warmup", "time_s", "data_wait_s")
    rows = []
    for seen in thinned(observed.steps):
        rate, work = seen.rate, seen.work
        if work is None and observed.work_per_step is not None and seen.steps:
            work = observed.work_per_step * seen.steps
        if unit == IN_STEPS:  # the work is not known of all
            rate, work = None, seen.steps
        rate = rate or (work / seen.time_s if work is not None and seen.time_s else None)
        own = {name: getattr(seen, name) for name in names}
        rows.append(seen.values | own | {"throughput": rate, "throughput_unit": unit})
    return rows


def thinned(of_run: Sequence[Any]) -> Sequence[Any]:
    """At most MAX_ROWS of what a table would have of one run: every second or third, ..."""
    return of_run[:: -(-len(of_run) // MAX_ROWS) or 1]


# The windows that the ranks of a run recorded. Each rank spaces them by its own clock. What lies
# between two steps at which all ranks ended a window is one observation. The slowest rank's time
# counts, and the work of all ranks is added up: that is the rate of the job.

_OfRanks = dict[Any, dict[int, Record]]  # the windows of each rank, by their last step


def observed_windows(
    windows: Iterable[Record], start: Record, planned: Mapping[str, Any], ranks: int | None = None
) -> Observed | None:
    """The observations of a run's window records of all ranks; None where there are none.

    start: rank 0's run_start. planned: the unit and work_per_step of the study; this work wins, and
    without it the unit of what was counted. ranks: how many there are, where start is not known.
    """
    groups: dict[int, _OfRanks] = defaultdict(lambda: defaultdict(dict))
    for record in windows:
        step, counts = record.get("step"), [record.get("steps"), record.get("wall_s")]
        if type(step) is int and all((number(value) or 0) > 0 for value in counts):
            groups[record["attempt"]][record.get("rank")][step] = record
    if not groups:
        return None
    world = recorded if type(recorded := start.get("world_size")) is int else ranks
    observations = [
        _over_ranks(attempt, step, of_ranks, world)
        for attempt, records in sorted(groups.items())
        for step, of_ranks in _between_common_ends(records)
    ]
    stated, unit = planned.get("work_per_step"), planned.get("unit")
    counted = start.get("unit") or ("images" if "spec" in start else None)
    per_step = stated or start.get("work_per_step")
    samples, batch = (number(start.get(n)) or 0 for n in ("train_samples", "global_batch_size"))
    if not per_step and samples > 0 and batch > 0:  # of all ranks, where one left no records
        per_step = samples / math.ceil(samples / batch)
    if stated:  # whatever was counted
        observations = [replace(o, work=stated * (o.steps or 0)) for o in observations]
    return Observed(
        steps=observations,
        unit=(unit or counted) if stated else (counted or unit),
        work_per_step=per_step if (number(per_step) or 0) > 0 else None,
        windows=True,
        work_source="stated" if stated else start.get("work_source"),
        source=str(start.get("source") or "meter"),
    )


def _between_common_ends(of_ranks: _OfRanks) -> Iterator[tuple[int, list[list[Record]]]]:
    """The steps at which all ranks ended a window, and the windows of each rank before them.

    A rank whose records end early holds up no later step.
    """
    lasts = {rank: max(windows) for rank, windows in of_ranks.items()}
    waiting: dict[Any, list[Record]] = defaultdict(list)
    for step in sorted({step for windows in of_ranks.values() for step in windows}):
        for rank, windows in of_ranks.items():
            if step in windows:
                waiting[rank].append(windows[step])
        if all(step in windows or lasts[rank] < step for rank, windows in of_ranks.items()):
            yield step, list(waiting.values())
            waiting.clear()


def _over_ranks(
    attempt: int, step: int, of_ranks: Sequence[Sequence[Record]], world: int | None
) -> Observation:
    """The windows of each rank that recorded some up to a common end."""

    def totals(name: str) -> list[float]:
        """The sum of a field over the windows of each rank that has it in all of them."""
        values = ([number(window.get(name)) for window in windows] for windows in of_ranks)
        return [sum(filter(None, of_rank)) for of_rank in values if None not in of_rank]

    counts, works = totals("steps"), totals("work")
    # Where a rank, or a window of one, is missing, the sum of the work would be too small.
    whole = world in (None, len(of_ranks)) and len(works) == len(of_ranks)
    first = next((w for w in of_ranks if w[0].get("rank") == 0), of_ranks[0])
    epoch = first[-1].get("epoch")
    return Observation(
        attempt=attempt,
        step=step,
        epoch=epoch if type(epoch) is int else None,
        # The most of a rank, as the time is the longest: one may lack a window.
        steps=int(max(counts)),
        time_s=max(totals("wall_s")),
        work=sum(works) if whole and len(set(counts)) == 1 else None,
        data_wait_s=max(totals("data_wait_s"), default=None),
        warmup=any(r.get("warmup") is True for windows in of_ranks for r in windows),
    )
