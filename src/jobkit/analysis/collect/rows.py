"""One row of results.csv, from the spec, the state and the records of one run."""

from collections.abc import Iterable, Mapping
from statistics import median, median_low
from typing import Any

from jobkit.analysis.collect.epoch_time import epoch_time
from jobkit.analysis.collect.measured import speed_row
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import Observed
from jobkit.analysis.collect.why import breakdown, not_profiled
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import Row
from jobkit.errors import UsageError
from jobkit.metric.kinds import KINDS, Record
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.state import RunState
from jobkit.spec.runspec import PlannedRun, RunSpec

_RESULT_NAMES = frozenset(c.name for c in RESULTS)
_OTHERWISE = {"threads", "work_source"}  # not what it says, and of the steps' source alone
_OF_RUN_START = tuple(k for k in KINDS["run_start"] if k in _RESULT_NAMES - _OTHERWISE)
_VERSIONS = ("torch", "python", "cuda", "hip", "nccl", "cudnn", "driver")
_MAXIMA = tuple(k for k in KINDS["epoch"] if k in _RESULT_NAMES and k.endswith("_memory_mib"))


def recorded_spec(records: RunRecords) -> RunSpec | None:
    """The spec that run_start carries, for a run that left no spec.json."""
    start = records.last("run_start")
    given = start.get("spec")
    try:
        return RunSpec.from_dict(given) if isinstance(given, dict) else None
    except (TypeError, UsageError):
        return None


def as_run(spec: PlannedRun | None, actual: RunSpec | None) -> PlannedRun | None:
    """The planned settings, with what they leave to the device as the run decided it.

    actual: as recorded_spec gives it.
    """
    return spec.decided(actual) if spec and actual else spec or actual


def unplanned_settings(spec: PlannedRun | None, actual: RunSpec | None, records: RunRecords) -> str:
    """The settings that a run recorded and that differ from its plan; empty where none does.

    actual: as recorded_spec gives it. results.csv has the planned ones, and a run that was started
    by hand may have had others.
    """
    start = records.last("run_start")
    if spec is None or actual is None or records.lost or "world_size" not in start:
        return ""
    return ", ".join(
        f"{name}={value} (planned: {planned})"
        for name, (value, planned) in spec.differing(actual).items()
    )


def result_row(
    spec: PlannedRun | None,
    state: RunState,
    records: RunRecords,
    job: Job | None = None,
    observed: Observed | None = None,
    wall_s: float | None = None,
) -> Row:
    """The row of a run, without the columns whose value is not known.

    observed: what was seen of its steps. wall_s: seconds from its job's start to the end.
    """
    row = {
        **(spec.columns() | _parameters(spec) if spec else {}),
        "status": state.status,
        "reason": state.reason or None,
        "evidence": state.evidence or None,
        "evidence_file": state.evidence_file or None,
        "exit_code": state.exit_code,
        "attempts": state.attempts,
        **_known(_where(records.last("run_start"))),
        **_known(_ending(records)),
        **_breakdown(records),
        **_messages(records.of("message")),
        **_slurm(job),
        **_known({"wall_time_s": wall_s}),
        "lines_rejected": sum(r.count for r in records.rejects),
        "records_lost": records.lost,
    }
    speed = speed_row(observed, _speed(records.epochs, row.get("train_samples")), row)
    return row | epoch_time(observed, records, speed) | speed


def _parameters(spec: PlannedRun) -> Row:
    """The values of a command's parameters; one named as a column of another meaning is renamed."""
    return {f"parameter_{n}" if n in _RESULT_NAMES else n: v for n, v in spec.parameters.items()}


def _where(start: Record) -> Row:
    """The machine and the actual sizes of the run, from run_start."""
    versions = start.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {
        **{name: start.get(name) for name in _OF_RUN_START},
        "threads_used": start.get("threads"),
        **{f"{name}_version": versions.get(name) for name in _VERSIONS},
        "cudnn_benchmark": versions.get("cudnn_benchmark"),
    }


def _ending(records: RunRecords) -> Row:
    """Final losses and accuracies, else those of the last epoch; peak memory; times of the job."""
    epochs = records.epochs
    last = epochs[-1] if epochs else {}
    end = records.last("run_end")
    startup = records.last("startup")
    newest = max((r["attempt"] for r in records.records if "v" in r), default=None)
    if end.get("attempt") != newest:
        end = {}  # of an earlier start
    loss, accuracy = end.get("val_loss"), end.get("val_accuracy")
    return {
        "epochs_done": len(epochs),
        "startup_s": startup.get("total_s"),
        **{f"startup_{name}": startup.get(name) for name in KINDS["startup"] if name != "total_s"},
        "total_time_s": end.get("total_time_s"),
        **_times(records.records, newest),
        "train_loss": last.get("train_loss"),
        "val_loss": last.get("val_loss") if loss is None else loss,
        "val_accuracy": last.get("val_accuracy") if accuracy is None else accuracy,
        "best_val_accuracy": max(_numbers(epochs, "val_accuracy"), default=None),
        **{name: max(_numbers(epochs, name), default=None) for name in _MAXIMA},
    }


def _times(records: list[Record], newest: int | None) -> Row:
    """When the newest attempt wrote its first and its last record."""
    found = _numbers([r for r in records if r.get("attempt") == newest and "v" in r], "t")
    return {"start_time_s": min(found), "end_time_s": max(found)} if found else {}


def _breakdown(records: RunRecords) -> Row:
    """Where the time of a step goes, from the profiled steps of all ranks."""
    windows = [*records.of("window"), *records.others]
    if not (found := breakdown(records.whys, windows)):
        found = _of_replica(records.of("breakdown"))
        found = found or {"not_profiled": not_profiled(records.whys)}
    return {f"breakdown_{name}": value for name, value in found.items()}


def _of_replica(records: list[Record]) -> Row:
    """The breakdown record with the median iteration, whole, so that its parts add up."""
    timed = [r for r in records if _is_number(r.get("iteration_s"))]
    if not timed:
        return {}
    median_s = median_low(r["iteration_s"] for r in timed)
    middle = next(r for r in timed if r["iteration_s"] == median_s)
    found = {name: middle.get(name) for name in KINDS["breakdown"] if name != "iterations"}
    return found | {"host_s": found.pop("other_s")}


def _messages(messages: list[Record]) -> Row:
    """The number of warnings and errors that a run recorded, and their texts."""
    serious = [m for m in messages if m.get("level") in ("warning", "error")]
    texts = dict.fromkeys(" ".join(str(m.get("text", "")).split()) for m in serious)
    return {"warnings": len(serious), "warnings_text": " | ".join(texts) or None}


def _slurm(job: Job | None) -> Row:
    """Slurm's data on the run's job."""
    if job is None:
        return {}
    names = ("state", "exit_code", "elapsed", "node_list", "alloc_tres", "max_rss_mib", "energy_j")
    return {f"slurm_{name}": getattr(job, name) or None for name in names}


def _speed(epochs: list[Record], train_samples: Any) -> Row:
    """The rate and the time of a whole epoch: median and spread over the timed epochs.

    The first epoch of an attempt is left out where there are others: it begins with the warm-up
    and has the fewest timed iterations.
    """
    timed = [e for e in epochs if _is_number(e.get("images_per_s")) and e["images_per_s"] > 0]
    first = _first_of_attempts(epochs)
    timed = [e for e in timed if id(e) not in first] or timed
    if not timed:
        return {}
    rates = [e["images_per_s"] for e in timed]
    waited = [e for e in timed if _is_number(e.get("data_wait_s"))]
    waited = [e for e in waited if _is_number(e.get("epoch_time_s"))]
    total = sum(e["epoch_time_s"] for e in waited)
    row: Row = {"images_per_s": median(rates)}
    if total > 0:
        row["data_wait_share"] = sum(e["data_wait_s"] for e in waited) / total
    if _is_number(train_samples):
        row["time_per_epoch_s"] = train_samples / median(rates)
        row["time_per_epoch_min_s"] = train_samples / max(rates)
        row["time_per_epoch_max_s"] = train_samples / min(rates)
    return row


def _first_of_attempts(epochs: list[Record]) -> set[int]:
    """The epochs, by their ids, with which an attempt began."""
    first: dict[str, int] = {}
    for epoch in epochs:
        first.setdefault(str(epoch.get("attempt")), id(epoch))
    return set(first.values())


def _known(values: Mapping[str, Any]) -> Row:
    return {k: v for k, v in values.items() if v is not None}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _numbers(records: Iterable[Record], name: str) -> list[float]:
    found: list[Any] = [r.get(name) for r in records]
    return [v for v in found if type(v) in (int, float)]
