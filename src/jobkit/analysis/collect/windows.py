"""The windows that the ranks of a run recorded, as observations over all ranks.

Each rank records its own windows. The slowest rank's time counts, the work of all ranks is added
up: that is the rate of the job. Each rank spaces its windows by its own clock: what lies between
two steps at which all ranks ended a window is one observation.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobkit.analysis.collect.steps import PERCENTILES, TRAINING, Observation, Observed, over_windows
from jobkit.metric.kinds import Record

_OfRanks = dict[Any, dict[int, Record]]  # the windows of each rank, by their last step
_TOO_LARGE = 1 << 63  # to be computed with


def observed_windows(
    windows: Iterable[Record],
    start: Record,
    planned: Mapping[str, Any],
    ranks: int | None = None,
) -> Observed | None:
    """The observations of a run's window records of all ranks; None where there are none.

    start: rank 0's run_start. planned: the unit and work_per_step of the study; this work wins, and
    without it the unit of what was counted. ranks: how many there are, where start is not known.
    """
    groups: dict[int, _OfRanks] = defaultdict(lambda: defaultdict(dict))
    for record in windows:
        attempt, step = record["attempt"], record.get("step")
        if type(step) is int and _positive(record.get("wall_s")):
            groups[attempt][record.get("rank")][step] = record
    if not groups:
        return None
    world = recorded if type(recorded := start.get("world_size")) is int else ranks
    stated = planned.get("work_per_step")
    per_step = stated or start.get("work_per_step")
    steps = [
        _over_ranks((attempt, step), found, world)
        for attempt, of_ranks in sorted(groups.items())
        for step, found in _between_common_ends(of_ranks)
    ]
    units = [start.get("unit") or ("images" if "spec" in start else None), planned.get("unit")]
    return Observed(
        steps=[_of_stated(one, stated) for one in steps] if stated else steps,
        unit=next(filter(None, reversed(units) if stated else units), None),
        work_per_step=per_step if _positive(per_step) else None,
        windows=True,
        work_source="stated" if stated else start.get("work_source"),
        source=str(start.get("source") or (TRAINING if "spec" in start else "meter")),
    )


def _of_stated(one: Observation, per_step: float) -> Observation:
    """An observation with the work that the study states, whatever was counted."""
    return replace(one, work=per_step * one.steps if one.steps else None)


def _between_common_ends(of_ranks: _OfRanks) -> Iterator[tuple[int, list[list[Record]]]]:
    """The steps at which all ranks ended a window, and the windows of each rank before them.

    A rank whose records end early holds up no later step.
    """
    lasts = {rank: max(own) for rank, own in of_ranks.items()}
    waiting: dict[Any, list[Record]] = defaultdict(list)
    for step in sorted({step for own in of_ranks.values() for step in own}):
        for rank, own in of_ranks.items():
            if step in own:
                waiting[rank].append(own[step])
        if all(step in own or lasts[rank] < step for rank, own in of_ranks.items()):
            yield step, list(waiting.values())
            waiting.clear()


def _over_ranks(
    place: tuple[int, int], found: Sequence[Sequence[Record]], world: int | None
) -> Observation:
    """The windows of each rank that recorded some up to a common end."""
    attempt, step = place
    # A rank, or a window of one, that is missing would make the work of all too small: then it is
    # not known.
    counts = [_steps(own) for own in found]
    whole = (world is None or len(found) == world) and len(set(counts)) == 1
    works = [number(r.get("work")) for own in found for r in own]
    work = sum(w for w in works if w is not None) if whole and None not in works else None
    first = next((own for own in found if own[0].get("rank") == 0), found[0])
    epoch, values = first[-1].get("epoch"), first[-1].get("values")
    slowest = {name: [v for own in found if (v := _percentile(own, name))] for name in PERCENTILES}
    return Observation(
        attempt=attempt,
        step=step,
        epoch=epoch if type(epoch) is int else None,
        # The most of a rank, as the time is the longest: one may lack a window.
        steps=max((n for n in counts if n is not None), default=None),
        time_s=max(sum(float(r["wall_s"]) for r in own) for own in found),
        work=work,
        data_wait_s=max((w for own in found if (w := _waits(own)) is not None), default=None),
        warmup=any(r.get("warmup") is True for own in found for r in own),
        percentiles={name: max(known) for name, known in slowest.items() if known},
        values=values if isinstance(values, dict) else {},
    )


def _steps(own: Sequence[Record]) -> int | None:
    """The steps in a rank's windows; None where one does not say it."""
    counts = [n if type(n := r.get("steps")) is int and n > 0 else None for r in own]
    return None if None in counts else sum(filter(None, counts))


def _waits(own: Sequence[Record]) -> float | None:
    """Seconds that a rank waited for data in its windows."""
    known = [w for r in own if (w := number(r.get("data_wait_s"))) is not None]
    return sum(known) if known else None


def _percentile(own: Sequence[Record], name: str) -> float | None:
    """A percentile of the time of a step over a rank's windows: as of windows of a run."""
    known = sorted((v, _steps([r]) or 1) for r in own if (v := number(r.get(name))) is not None)
    return over_windows(name, known) if known else None


def number(value: Any) -> float | None:
    """A number of a record; None for anything else, as for one of more than 64 bits."""
    fits = type(value) is float or (type(value) is int and abs(value) < _TOO_LARGE)
    return value if fits else None


def _positive(value: Any) -> bool:
    found = number(value)
    return found is not None and found > 0
