"""One row of results.csv: from the plan, the state and the records of a run, and how fast it was.

The sources of the rate, the best first: windows of the meter, lines that the study's pattern finds,
windows of the start-up hook, [METRIC] key=value lines, and at last the wall time of the whole run,
which has its start-up in it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Any

from jobkit.analysis.collect import steps
from jobkit.analysis.collect.lines import METRIC_LINES, matches, observed_lines, observed_metrics
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.why import breakdown
from jobkit.analysis.scaling.sizes import IMAGES, RUNS
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import IN_STEPS, OTHER_WORK
from jobkit.analysis.tables.text import counted
from jobkit.files import MAX_LOG, open_regular
from jobkit.metric.kinds import COMMON, Record, epoch_of, number
from jobkit.metric.pattern import Pattern, observes
from jobkit.outcome.state import RunState
from jobkit.spec.command import CommandSpec, PlannedRun

WALL_TIME = f"wall time of the run, {steps.WITH_START}"
_RESULT_NAMES = frozenset(c.name for c in RESULTS)
_RECORDED = [c for c in RESULTS if c.record in ("run_start", "startup")]
# Columns from the field versions of run_start, where cudnn_version is cudnn.
_OF_VERSIONS = (
    *("torch_version", "python_version", "cuda_version", "hip_version", "nccl_version"),
    *("cudnn_version", "driver_version", "cudnn_benchmark"),
    *("gpu_max_clock", "gpu_power_limit"),
)
_UNSEEN_S = 5.0  # a run that is shorter may end before its ranks are looked at
_MAX_NAMES = 5  # of lines in no table, that are shown of a run
# What identifies a run, or a record among others, is no column of an epoch, step or sample.
OF_RUN = ("run_id", "study", "series", "strategy", "world_size", "repeat")
IDENTIFIES = {*COMMON, "values", *OF_RUN} - {"attempt"}
_NOT_SHOWN = frozenset(("rank", "attempt", "step", "epoch", "t", "seq"))


def observed_of(
    log: Path,
    within: Path,
    records: RunRecords,
    planned: object,
    pattern: Pattern | None,
    ranks: int | None,
    *,
    by_pattern: bool = False,
) -> steps.Observed | None:
    """What was observed of the steps of a run; None where nothing was.

    within: the folder out of which no link may lead. planned: an object with the unit,
    work_per_step and warmup_steps that were stated, as far as it has them. by_pattern: what the
    pattern finds counts alone, whatever else there is.
    """
    stated = {n: getattr(planned, n, None) for n in ("unit", "work_per_step", "warmup_steps")}
    windows = records.of_all_ranks("window")
    by_meter = steps.observed_windows(windows, records.last("run_start"), stated, ranks)
    by_lines = None
    if pattern and (by_pattern or by_meter is None or by_meter.source == "auto"):
        try:
            with open_regular(log, MAX_LOG, within) as stream:
                by_lines = observed_lines(matches(stream, pattern), pattern, ranks, stated)
        except OSError:
            pass  # the reader of records says why
    if by_lines and (by_lines.steps or by_pattern):
        return by_lines
    of_steps = [r for r in records.records if "step" in r or "epoch" not in r]
    best = by_meter or observed_metrics(of_steps, ranks, stated)
    best = best or observed_metrics(records.epochs, ranks, stated)
    if best and by_lines:
        return replace(best, not_taken=[*best.not_taken, *by_lines.not_taken])
    return best or by_lines


def ranks_together(job: Mapping[str, Any], records: RunRecords, spec: object) -> str | None:
    """What shows that the ranks of a command worked together; "none": nothing does.

    "unknown": the run was too short to be looked at. None where that is not asked: one rank,
    jobkit's own training, a command that starts its own ranks. job: what its job.json says.
    """
    if not isinstance(spec, CommandSpec) or spec.world_size == 1 or spec.launcher == "once":
        return None
    if spec.together:
        return "stated"
    size = records.last("run_start").get("group_size")
    if type(size) is int and size > 1:
        return "process group"
    if isinstance(seen := job.get("ranks_together"), str):
        return seen
    # In a longer run they could not be seen, as in a container.
    short = (number(job.get("elapsed_s")) or _UNSEEN_S) < _UNSEEN_S
    return "unknown" if short and "ranks_together" in job else None


def wall_time_s(job: Mapping[str, Any], attempts: int) -> float | None:
    """Seconds from the start of the run's job to its end; None for a run of several attempts."""
    elapsed = job.get("elapsed_s")  # by a clock that does not jump
    is_time = isinstance(elapsed, float) and 0 < elapsed < math.inf
    return elapsed if is_time and attempts <= 1 else None


def result_row(
    spec: PlannedRun | None,
    state: RunState,
    records: RunRecords,
    observed: steps.Observed | None = None,
    wall_s: float | None = None,
) -> Row:
    """The row of a run, without the columns whose value is not known.

    observed: what was seen of its steps. wall_s: seconds from its job's start to the end.
    """
    newest = {kind: records.last(kind) for kind in ("run_start", "startup")}
    versions = object_of(newest["run_start"], "versions")
    messages = [r for r in (*records.records, *records.of_ranks) if r.get("kind") == "message"]
    serious = [m for m in messages if m.get("level") in ("warning", "error")]
    texts = dict.fromkeys(" ".join(str(m.get("text", "")).split()) for m in serious)
    parts = breakdown(records.of_all_ranks("why"), records.of_all_ranks("window"))
    parts["difference_s"] = records.last("difference").get("difference_s")
    parameters = spec.parameters if spec else {}
    recorded = {
        **{column.name: newest[column.record].get(column.field) for column in _RECORDED},
        **{name: versions.get(name.removesuffix("_version")) for name in _OF_VERSIONS},
        **_ending(records),
    }
    row = {
        **(spec.columns() if spec else {}),
        # A parameter that has the name of a column of another meaning is renamed.
        **{f"parameter_{n}" if n in _RESULT_NAMES else n: v for n, v in parameters.items()},
        **{k: v for k, v in recorded.items() if v is not None},
        "status": state.status,
        **{k: getattr(state, k) or None for k in ("reason", "evidence", "evidence_file")},
        "exit_code": state.exit_code,
        "attempts": state.attempts,
        "wall_time_s": wall_s,
        **{f"breakdown_{name}": value for name, value in parts.items()},
        "warnings": len(serious),
        "warnings_text": " | ".join(texts) or None,
        "lines_rejected": records.rejected,
        "records_lost": records.lost,
    }
    return row | speed_row(observed, row)


def object_of(record: Record, name: str) -> dict[str, Any]:
    """A field that is an object; empty where it is something else."""
    return value if isinstance(value := record.get(name), dict) else {}


def _ending(records: RunRecords) -> Row:
    """Final losses and accuracies, else those of the last epoch; peak memory; times of the job."""
    epochs, newest = records.epochs, records.newest
    last = epochs[-1] if epochs else {}
    end = records.last("run_end")
    if end.get("attempt") != newest:
        end = {}  # of an earlier start
    loss, accuracy = end.get("val_loss"), end.get("val_accuracy")
    times = _numbers([r for r in records.records if r.get("attempt") == newest and "v" in r], "t")
    return {
        "epochs_done": len(epochs),
        "total_time_s": end.get("total_time_s"),
        "start_time_s": min(times, default=None),
        "end_time_s": max(times, default=None),
        "train_loss": last.get("train_loss"),
        "val_loss": last.get("val_loss") if loss is None else loss,
        "val_accuracy": last.get("val_accuracy") if accuracy is None else accuracy,
        "best_val_accuracy": max(_numbers(epochs, "val_accuracy"), default=None),
        "peak_memory_mib": max(_numbers(epochs, "peak_memory_mib"), default=None),
    }


def _numbers(records: Iterable[Record], name: str) -> list[float]:
    return [value for r in records if (value := number(r.get(name))) is not None]


def speed_row(observed: steps.Observed | None, run: Mapping[str, Any]) -> Row:
    """The columns about the rate: of the steps, else of the wall time.

    run: status, wall_time_s, train_samples, and planned scaling and world_size of the run.
    """
    row, samples = steps.rate_row(observed) if observed else Row(), number(run.get("train_samples"))
    if "throughput" in row:
        if samples and row["throughput_unit"] == IMAGES and row["throughput"] > 0:
            row["time_per_epoch_s"] = samples / row["throughput"]
        return row
    wall, weak = run.get("wall_time_s"), run.get("scaling") == "weak"
    # Lines of which it is not known whether they are of one rank or of all forbid the wall time:
    # one size would be in other units than the others.
    if run.get("status") != "ok" or not wall or (observed and observed.source == METRIC_LINES):
        return row
    # Weak: a rank's work is the same at each size, so that all ranks together do more in a run.
    runs, unit = (run.get("world_size") or 1, "shares/h") if weak else (1, RUNS)
    rate = {"throughput": 3600 * runs / wall, "throughput_unit": unit}
    return row | rate | {"throughput_source": WALL_TIME}


def rate_alike(rows: Iterable[Row]) -> None:
    """Leave runs without a rate where it has no median with the others of their size.

    It has the start-up or warm-up alone in it, and others of its series show their steps; or it is
    in another unit than most of its size.
    """
    ok = [row for row in rows if row["status"] == "ok" and "throughput" in row]
    rough = steps.WITH_START, steps.WARM_UP  # at the end of a source
    kinds = [(row["throughput_source"].endswith(rough), row["throughput_unit"]) for row in ok]
    places = [(row["series"], row["world_size"], row.get("nodes")) for row in ok]
    rated = list(zip(ok, kinds, places, strict=True))
    of_steps = {series for _, (whole, _), (series, *_) in rated if not whole}
    alike = defaultdict[Any, list[tuple[bool, str]]](list)
    for _, kind, place in rated:
        if not (kind[0] and place[0] in of_steps):
            alike[place].append(kind)
    usual = {place: mode(of_size) for place, of_size in alike.items()}
    for row, kind, place in rated:
        if kind != usual.get(place):
            row |= dict.fromkeys(("throughput", "throughput_unit", "throughput_source"))


def steps_of_ranks(row: Row) -> Row:
    """The row; in weak scaling the work of a step grows with the ranks, and so does its rate."""
    if row.get("throughput_unit") == IN_STEPS and row.get("scaling") == "weak":
        ranks = row.get("world_size") or 1
        return row | {"throughput": row["throughput"] * ranks, "throughput_unit": "rank-steps/s"}
    return row


def of_tables(
    run_id: str, records: RunRecords, observed: steps.Observed | None, row: Row
) -> dict[str, Any]:
    """A run's rows for each table, row that of results.csv, and its problems, one line each."""
    found = list[str]()
    if records.lost:
        found.append(f"{counted(records.lost, 'record')} lost")
    if unused := unused_lines(records, observed):
        found.append(unused)
    if observed and observed.steps and all(o.warmup for o in observed.steps):
        found.append("only warm-up steps were measured: train longer or lower --warmup-steps")
    stated = (observed and observed.work_per_step) or 0
    said = (row.get("throughput") or 0) * (row.get("step_time_s") or 0)
    if said and stated and max(said / stated, stated / said) > OTHER_WORK:
        why = f"rate x step time is {said:.4g}, but the work of a step is {stated:.4g}"
        found.append(f"{why}: is the rate that of one rank?")
    return {
        "row": row,
        "epochs": [object_of(record, "values") | record for record in records.epochs],
        "steps": steps.step_rows(observed) if observed else [],
        "samples": steps.thinned(records.of_all_ranks("sample")),
        "problems": [*records.problems, *(f"{run_id}: {problem}" for problem in found)],
    }


def unused_lines(records: RunRecords, observed: steps.Observed | None) -> str:
    """How many lines are in no table and what they name; empty where there are none.

    Those are key=value lines that say neither an epoch nor a time or rate, or whose steps or epochs
    the run recorded in a better way. Of a pattern, those that are not taken.
    """
    by_lines = observed is not None and observed.source == METRIC_LINES
    count, names = 0, dict[str, None]()
    for record in (r for r in records.records if "v" not in r):
        of_epoch = epoch_of(record) is not None and not records.records_epochs
        if not of_epoch and not (by_lines and observes(record)):
            count += 1
            names |= dict.fromkeys([n for n in record if n not in _NOT_SHOWN] or record)
    lines = list(observed.not_taken) if observed else []
    if count:
        shown = ", ".join([*names][:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        verb = "is" if count == 1 else "are"
        lines.insert(0, f"{counted(count, '[METRIC] line')} {verb} in no table ({shown})")
    return "; ".join(lines)
