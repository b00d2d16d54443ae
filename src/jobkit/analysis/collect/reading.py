"""The runs of a study, one after the other: what is read of each, or was kept of the last time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jobkit.analysis.collect.kept import Kept, Mark, decoded, encoded, key_of, mark_of
from jobkit.analysis.collect.measured import observed_of, wall_time_s
from jobkit.analysis.collect.records import Reject, RunRecords, read_run
from jobkit.analysis.collect.rows import as_run, recorded_spec, result_row, unplanned_settings
from jobkit.analysis.collect.samples import sample_rows, use_row
from jobkit.analysis.collect.steps import step_rows
from jobkit.analysis.collect.study import StudyRuns, run_states
from jobkit.analysis.collect.unused import unused_lines
from jobkit.analysis.tables.columns import EPOCHS, SAMPLES, STEPS
from jobkit.analysis.tables.frames import Cells, Row, cells_of
from jobkit.analysis.tables.series import series_labels
from jobkit.cores import in_order
from jobkit.metric.line import COMMON, KINDS, Record
from jobkit.metric.pattern import pattern_of
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.status import FINAL, RunState
from jobkit.paths import RunPaths
from jobkit.spec.plan import read_spec
from jobkit.spec.planned import PlannedRun

OF_EPOCH = tuple(c for c in EPOCHS if c.name in (*KINDS["epoch"], "attempt"))
# What identifies a run, or a record among others: no columns of an epoch's own.
NOT_OF_EPOCH = {*COMMON, "part", "parts", "values", *(c.name for c in EPOCHS if c not in OF_EPOCH)}
_DROPPED = NOT_OF_EPOCH - {c.name for c in OF_EPOCH}
_NAMES_OF_EPOCH = NOT_OF_EPOCH | {c.name for c in EPOCHS}
# The same of a row of steps or samples.
OF_RUN = ("run_id", "study", "series", "world_size", "repeat")
NOT_OF_ROW = {*COMMON, *OF_RUN}
_NAMES_OF_ROW = NOT_OF_ROW | {c.name for c in (*STEPS, *SAMPLES)}


@dataclass
class Read:
    """What was read of all runs, in the order of the plan."""

    rows: list[Row] = field(default_factory=list)
    epochs: list[Cells] = field(default_factory=list)
    steps: list[Cells] = field(default_factory=list)
    samples: list[Cells] = field(default_factory=list)
    rejected: list[Reject] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    not_taken: dict[str, int] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    contradicted: dict[str, str] = field(default_factory=dict)

    def add(self, run_id: str, name: str, found: dict[str, Any]) -> None:
        """Add what was found of a run of the study of this name."""
        self.rows.append(found["row"] | {"run_id": run_id, "study": name})
        self.epochs.append(found["epochs"])
        self.steps.append(found["steps"])
        self.samples.append(found["samples"])
        self.rejected += [Reject(*words) for words in found["rejected"]]
        for what in ("lost", "not_taken", "unused", "contradicted"):
            if found[what]:
                getattr(self, what)[run_id] = found[what]


def read_runs(planned: StudyRuns, kept: Kept) -> Read:
    """Read every run that is not kept as it is now; keep only the epochs of its records."""
    # States first: a run that ends in between is then running with all its records, not ok
    # without some.
    joined = run_states(planned)
    jobs = Counter(job.job_id for job in joined.jobs.values())
    read, specs = Read(), {}
    name = planned.paths.folder.resolve().name
    ones = []
    for run_id, paths in planned.folders.items():
        spec, job, state = planned.specs[run_id], joined.jobs.get(run_id), joined.states[run_id]
        alone = job is not None and jobs[job.job_id] == 1
        ones.append(_OneRun(paths, planned.record_ids[run_id], spec, state, job, alone))
    for run_id, one, found in zip(planned.folders, ones, _found(ones, kept), strict=True):
        specs[run_id] = _as_run(one.spec, found["settings"])
        read.add(run_id, name, found)
    labels = series_labels(specs)
    for row in read.rows:
        row["series"] = labels[row["run_id"]]
    return read


@dataclass
class _OneRun:
    """What a run's results are made of."""

    paths: RunPaths
    record_id: str | None
    spec: PlannedRun | None
    state: RunState
    job: Job | None
    alone: bool  # the job is this run's only

    def key(self, mark: Mark) -> bytes:
        """A key for all of it; mark: its files, as they are."""
        spec, job = self.spec, self.job
        planned = (type(spec).__name__, *vars(spec).values()) if spec else None
        said = (tuple(vars(self.state).values()), tuple(vars(job).values()) if job else None)
        names = (self.paths.folder.name, self.record_id)
        return key_of(names, planned, pattern_of(spec), said, self.alone, mark)

    def read(self) -> dict[str, Any]:
        """What its files hold, as JSON takes it."""
        records = read_run(self.paths, self.record_id)
        actual = recorded_spec(records)
        spec = as_run(self.spec, actual)
        observed = observed_of(self.paths, records, spec)
        # Where rates may lie in a file that is closed to us, the wall time stands for none of them.
        wall_s = None if records.unreadable else wall_time_s(self.paths, self.state.attempts)
        row = result_row(spec, self.state, records, self.job, observed, wall_s)
        slurm_j = self.job.energy_j if self.job and self.alone else None
        planned = self.spec.to_dict() if self.spec else {}
        decided = spec.to_dict() if spec and spec is not self.spec else {}
        return {
            "row": row | use_row(records, observed, row, slurm_j),
            "settings": {k: v for k, v in decided.items() if (k, v) not in planned.items()},
            "samples": row_cells(sample_rows(records.samples)),
            "epochs": epoch_cells(records),
            "steps": row_cells(step_rows(observed) if observed else []),
            "rejected": [[r.file, r.count, r.offset, r.reason] for r in records.rejects],
            "contradicted": unplanned_settings(spec, actual, records),
            "unused": unused_lines(records, observed),
            "lost": records.lost,
            "not_taken": records.epochs_not_taken,
        }


def epoch_cells(records: RunRecords) -> Cells:
    """The records of a run's epochs with the program's values, without what identifies the run."""
    whole = [{**_values(r), **r} for r in records.epochs]
    rows = [{k: v for k, v in r.items() if k not in _DROPPED} for r in whole]
    return cells_of(rows, _NAMES_OF_EPOCH)


def _values(record: Record) -> Record:
    """The values that a program gave to an epoch."""
    found = record.get("values")
    return found if isinstance(found, dict) else {}


def row_cells(rows: Sequence[Row]) -> Cells:
    """Rows of a run's steps or samples."""
    return cells_of(rows, _NAMES_OF_ROW)


def _found(ones: Sequence[_OneRun], kept: Kept) -> Iterator[dict[str, Any]]:
    """What was kept of each run that is as it was; else what is read, which is kept then."""
    for key, line, found in in_order(partial(_look, kept), ones):
        if key and line:
            kept.keep(key, line)
        elif key:
            line = kept.take(key)
        yield found or decoded(line)


def _look(kept: Kept, one: _OneRun) -> tuple[bytes, bytes, dict[str, Any] | None]:
    """What was made of a run: by the key of what is kept, as JSON, or as it is.

    With a key it may be kept: the run has ended, and nobody wrote meanwhile. What is kept and what
    is not is JSON alike, so that both give the same tables.
    """
    mark = mark_of(one.paths) if one.state.status in FINAL else None
    key = one.key(mark) if mark is not None else b""
    if key in kept:
        return key, b"", None
    made = one.read()
    if (line := encoded(made)) is None:
        return b"", b"", made
    return key if key and mark_of(one.paths) == mark else b"", line, None


def _as_run(planned: PlannedRun | None, settings: dict[str, Any]) -> PlannedRun | None:
    """The planned settings, with those that the run decided."""
    if not settings:
        return planned
    return read_spec({**(planned.to_dict() if planned else {}), **settings})
