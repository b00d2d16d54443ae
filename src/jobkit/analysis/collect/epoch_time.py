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
    """The optimizer steps of an epoch, by rank 0's windows: the median over the epochs.

    The steps between two records of epochs are of as many epochs as their numbers differ by: a
    program may call meter.epoch() at some epochs only. Before an attempt's first record they are of
    one epoch where that is number 0 of the first attempt; an earlier attempt may have trained a
    part of others, or epochs may be counted from 1.
    """
    steps: dict[Any, int] = defaultdict(int)  # by attempt, since its last record of an epoch
    last: dict[Any, int] = {}
    later, earliest = list[int](), list[int]()
    for record in records.records:
        attempt, kind = record.get("attempt"), record.get("kind")
        if kind == "window" and type(count := record.get("steps")) is int:
            steps[attempt] += count
        if kind != "epoch" or type(number := record.get("epoch")) is not int:
            continue
        made, before = steps.pop(attempt, 0), last.get(attempt)
        last[attempt] = number
        if before is not None and made and number > before:
            later.append(round(made / (number - before)))
        elif before is None and made and number == attempt == 0:
            earliest.append(made)
    counts = later or earliest
    return median_low(counts) if counts else None
