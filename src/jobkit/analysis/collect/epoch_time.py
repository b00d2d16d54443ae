"""The time of an epoch of a program that says where its epochs end, as by meter.epoch()."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median_low
from typing import Any

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import TRAINING, Observed
from jobkit.analysis.tables.frames import Row


def epoch_time(observed: Observed | None, records: RunRecords, speed: Mapping[str, Any]) -> Row:
    """time_per_epoch_s: the steps of an epoch times step_time_s, of a program with a meter.

    speed: the columns about the rate. Empty for jobkit's own training, which has it already, and
    where no whole epoch was recorded.
    """
    if observed is None or not observed.windows or observed.source == TRAINING:
        return {}
    step_s, steps = speed.get("step_time_s"), steps_of_epoch(records)
    return {"time_per_epoch_s": steps * step_s} if steps and step_s else {}


def steps_of_epoch(records: RunRecords) -> int | None:
    """The optimizer steps of an epoch, by rank 0's windows: the median over whole epochs.

    The first epoch of an attempt does not count where there are others: an earlier attempt may
    have trained a part of it. Windows before the first epoch's end do not know its number.
    """
    whole = {(r.get("attempt"), r["epoch"]) for r in records.epochs}
    steps: dict[tuple[Any, int], int] = defaultdict(int)
    first: dict[Any, int] = {}  # by attempt
    unnumbered: dict[Any, int] = defaultdict(int)
    for record in records.of("window"):
        attempt, epoch, count = record["attempt"], record.get("epoch"), record.get("steps")
        if type(count) is not int:
            continue
        if type(epoch) is not int:
            unnumbered[attempt] += count
            continue
        first.setdefault(attempt, epoch)
        steps[attempt, epoch] += count
    for attempt, epoch in first.items():
        steps[attempt, epoch] += unnumbered[attempt]
    begun = set(first.items())
    later = [n for place, n in steps.items() if place in whole - begun]
    earliest = [n for place, n in steps.items() if place in whole & begun and place[0] == 0]
    counts = later or earliest
    return median_low(counts) if counts else None
