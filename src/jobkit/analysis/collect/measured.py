"""How fast a run was, from the best source that it left, and its rows in steps.csv.

The sources, the best first: windows of the meter, lines that the study's pattern finds, windows of
the start-up hook, [METRIC] key=value lines, the epochs of a training, and at last the wall time of
the whole run, which has its start-up in it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jobkit.analysis.collect.lines import matches, observed_lines, observed_metrics
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import PERCENTILES, TRAINING, Observed, rate_row
from jobkit.analysis.collect.unused import lines_not_taken
from jobkit.analysis.collect.windows import observed_windows
from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import Record
from jobkit.metric.pattern import Pattern, pattern_of
from jobkit.outcome.logs import open_log
from jobkit.outcome.state import seconds
from jobkit.paths import RunPaths, read_json
from jobkit.spec.command import CommandSpec

OF_EPOCHS = "epochs of the training"
WALL_TIME = "wall time of the run, start-up included"
_OF_STEPS = ("step_time_s", "steps_timed", *PERCENTILES)
_STATED = ("unit", "work_per_step", "warmup_steps")


def observed_of(paths: RunPaths, records: RunRecords, spec: object) -> Observed | None:
    """What was observed of the steps of a run; None where nothing was."""
    planned = {name: getattr(spec, name, None) for name in _STATED}
    windows = [*records.of("window"), *records.others]
    ranks = getattr(spec, "world_size", None)
    by_meter = observed_windows(windows, records.last("run_start"), planned, ranks)
    pattern = pattern_of(spec)
    by_lines = None
    if pattern and (by_meter is None or by_meter.source == "auto"):
        by_lines = _by_pattern(paths, pattern, ranks, planned)
    if by_lines and by_lines.steps:
        return by_lines
    found = by_meter if by_meter and by_meter.steps else None
    if found is None:
        foreign = [r for r in records.records if "v" not in r]
        found = observed_metrics(foreign, ranks, planned)
    if found and by_lines:
        return replace(found, others=lines_not_taken(by_lines))
    return found or by_lines


def _by_pattern(
    paths: RunPaths, pattern: Pattern, ranks: int | None, planned: Mapping[str, Any]
) -> Observed | None:
    """What a pattern finds in a run's log; None without one that can be read."""
    try:
        with open_log(paths.log, paths.folder.parent) as stream:
            return observed_lines(matches(stream, pattern), pattern, ranks, planned)
    except OSError:
        return None  # the reader of records says why


def ranks_together(paths: RunPaths, records: RunRecords, spec: object) -> str | None:
    """What shows that the ranks of a command worked together; "none": nothing does.

    None where that is not asked: one rank, jobkit's own training, a command that starts its own
    ranks, or a run that was too short to be looked at.
    """
    if not isinstance(spec, CommandSpec) or spec.world_size == 1 or spec.launcher == "once":
        return None
    if spec.together:
        return "stated"
    size = records.last("run_start").get("group_size")
    if type(size) is int and size > 1:
        return "process group"
    seen = (read_json(paths.job) or {}).get("ranks_together")
    return seen if isinstance(seen, str) else None


def speed_row(observed: Observed | None, epochs: Row, state: Mapping[str, Any]) -> Row:
    """The columns about the rate: of the steps, else of the epochs, else of the wall time.

    epochs: the row that the epochs make. state: status and wall_time_s of the run, its planned
    scaling and world_size.
    """
    row = rate_row(observed) if observed else {}
    if observed and observed.source == TRAINING:
        row = {name: row[name] for name in _OF_STEPS if name in row}
    if "throughput" in row:
        return epochs | row
    if (rate := epochs.get("images_per_s")) is not None:
        return epochs | row | _rate(rate, "images/s", OF_EPOCHS)
    wall, weak = state.get("wall_time_s"), state.get("scaling") == "weak"
    if state.get("status") != "ok" or not wall:
        return epochs | row
    # Weak: a rank's work is the same at each size, so that all ranks together do more in a run.
    runs = (state.get("world_size") or 1) if weak else 1
    unit = "shares/h" if weak else "runs/h"
    return epochs | row | _rate(3600 * runs / wall, unit, WALL_TIME)


def _rate(rate: float, unit: str, source: str) -> Row:
    return {"throughput": rate, "throughput_unit": unit, "throughput_source": source}


def wall_time_s(paths: RunPaths, attempts: int) -> float | None:
    """Seconds from the start of the run's job to its end; None for a run of several attempts."""
    job: Record = read_json(paths.job) or {}
    if isinstance(known := job.get("elapsed_s"), float) and 0 < known < math.inf:
        return known if attempts <= 1 else None  # by a clock that does not jump
    begun, ended = seconds(job.get("started")), seconds(job.get("ended"))
    return ended - begun if attempts <= 1 and 0 < begun < ended < math.inf else None
