"""The windows that the ranks of a run recorded, as observations over all ranks.

Each rank records its own windows. The slowest rank's time counts, the work of all ranks is added
up: that is the rate of the job. Windows of different ranks belong together by their last step.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobkit.analysis.collect.steps import PERCENTILES, TRAINING, Observation, Observed
from jobkit.metric.line import Record

_TOO_LARGE = 1 << 63  # to be computed with


def observed_windows(
    windows: Iterable[Record], start: Record, planned: Mapping[str, Any]
) -> Observed | None:
    """The observations of a run's window records of all ranks; None where there are none.

    start: rank 0's run_start. planned: the unit and work_per_step of the study, which win.
    """
    groups: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in windows:
        attempt, step = record["attempt"], record.get("step")
        if type(step) is int and _positive(record.get("wall_s")):
            groups[attempt, step].append(record)
    if not groups:
        return None
    ranks = start.get("world_size")
    world = ranks if type(ranks) is int else None
    per_step = planned.get("work_per_step") or start.get("work_per_step")
    return Observed(
        steps=[_over_ranks(key, found, world) for key, found in sorted(groups.items())],
        unit=planned.get("unit") or start.get("unit") or ("images" if "spec" in start else None),
        work_per_step=per_step if _positive(per_step) else None,
        windows=True,
        source=str(start.get("source") or (TRAINING if "spec" in start else "meter")),
    )


def _over_ranks(place: tuple[int, int], found: Sequence[Record], world: int | None) -> Observation:
    """One window over the ranks that recorded it."""
    attempt, step = place
    by_rank = {record.get("rank"): record for record in found}
    records = list(by_rank.values())
    # A rank that is missing would make the work of all too small: then it is not known.
    works = [number(r.get("work")) for r in records]
    whole = world is None or len(records) == world
    work = sum(w for w in works if w is not None) if whole and None not in works else None
    waits = [w for r in records if (w := number(r.get("data_wait_s"))) is not None]
    first = by_rank.get(0, records[0])
    values = first.get("values")
    slowest = {
        name: max(v for r in records if (v := number(r.get(name))) is not None)
        for name in PERCENTILES
        if any(number(r.get(name)) is not None for r in records)
    }
    steps, epoch = first.get("steps"), first.get("epoch")
    return Observation(
        attempt=attempt,
        step=step,
        epoch=epoch if type(epoch) is int else None,
        steps=steps if type(steps) is int and steps > 0 else None,
        time_s=max(float(r["wall_s"]) for r in records),
        work=work,
        data_wait_s=max(waits, default=None),
        warmup=any(r.get("warmup") is True for r in records),
        percentiles=slowest,
        values=values if isinstance(values, dict) else {},
    )


def number(value: Any) -> float | None:
    """A number of a record; None for anything else, as for one of more than 64 bits."""
    fits = type(value) is float or (type(value) is int and abs(value) < _TOO_LARGE)
    return value if fits else None


def _positive(value: Any) -> bool:
    found = number(value)
    return found is not None and found > 0
