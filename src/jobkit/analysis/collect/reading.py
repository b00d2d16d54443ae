"""The runs of a study: what is read of each."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobkit.analysis.collect.measured import observed_of, ranks_together, wall_time_s
from jobkit.analysis.collect.records import UNREADABLE, Reject, RunRecords, read_run
from jobkit.analysis.collect.rows import as_run, recorded_spec, result_row, unplanned_settings
from jobkit.analysis.collect.samples import sample_rows, use_row
from jobkit.analysis.collect.steps import step_rows
from jobkit.analysis.collect.study import StudyRuns, run_states
from jobkit.analysis.collect.unused import unused_lines
from jobkit.analysis.tables.columns import EPOCHS
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import series_labels
from jobkit.analysis.tables.text import counted
from jobkit.files import in_order
from jobkit.metric.kinds import COMMON, KINDS, Record
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.state import RunState
from jobkit.paths import RunPaths
from jobkit.spec.runspec import PlannedRun
from jobkit.spec.study import read_spec

OF_EPOCH = tuple(c for c in EPOCHS if c.name in (*KINDS["epoch"], "attempt"))
# What identifies a run, or a record among others: no columns of an epoch's own.
NOT_OF_EPOCH = {*COMMON, "values", *(c.name for c in EPOCHS if c not in OF_EPOCH)}
_DROPPED = NOT_OF_EPOCH - {c.name for c in OF_EPOCH}
# The same of a row of steps or samples.
OF_RUN = ("run_id", "study", "series", "world_size", "repeat")
NOT_OF_ROW = {*COMMON, *OF_RUN}


@dataclass
class Read:
    """What was read of all runs, in the order of the plan; epochs, steps, samples: of each run."""

    rows: list[Row] = field(default_factory=list)
    epochs: list[list[Row]] = field(default_factory=list)
    steps: list[list[Row]] = field(default_factory=list)
    samples: list[list[Row]] = field(default_factory=list)
    rejected: list[Reject] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)

    def add(self, run_id: str, name: str, found: dict[str, Any]) -> None:
        """Add what was found of a run of the study of this name."""
        problems = " | ".join(line.replace(" | ", " / ") for line in _problems(run_id, found))
        own = {"run_id": run_id, "study": name, "problems": problems or None}
        self.rows.append(found["row"] | own)
        self.epochs.append(found["epochs"])
        self.steps.append(found["steps"])
        self.samples.append(found["samples"])
        self.rejected += found["rejected"]
        if found["lost"]:
            self.lost[run_id] = found["lost"]


def _problems(run_id: str, found: Mapping[str, Any]) -> list[str]:
    """What is wrong with the records of a run, one line each."""
    lines = [_rejected(reject) for reject in found["rejected"]]
    if lost := found["lost"]:
        lines.append(f"{run_id}: {counted(lost, 'record')} lost")
    if count := found["not_taken"]:
        of = counted(count, "epoch")
        lines.append(f"{run_id}: {of} without a checksum beside its own records: not taken")
    if found["unused"]:
        lines.append(f"{run_id}: {found['unused']}")
    if found["contradicted"]:
        lines.append(f"{run_id}: not run as planned: {found['contradicted']}")
    return lines


def _rejected(reject: Reject) -> str:
    """The line for a file that could not be read, or of which lines were rejected."""
    if reject.reason.startswith(UNREADABLE):
        return f"{reject.file} {reject.reason}"
    place = "" if reject.offset is None else f" at byte {reject.offset}"
    count = counted(reject.count, "[METRIC] line")
    return f"{reject.file}: {count} rejected, the first{place}: {reject.reason}"


def read_runs(planned: StudyRuns) -> Read:
    """Read every run; keep only the epochs of its records."""
    # States first: a run that ends in between is then running with all its records, not ok
    # without some.
    joined = run_states(planned)
    jobs = Counter(job.job_id for job in joined.jobs.values())
    read, specs = Read(), {}
    name = planned.paths.folder.resolve().name
    runs = []
    for run_id, paths in planned.folders.items():
        spec, job, state = planned.specs[run_id], joined.jobs.get(run_id), joined.states[run_id]
        alone = job is not None and jobs[job.job_id] == 1
        runs.append(_Run(paths, planned.record_ids[run_id], spec, state, job, alone))
    for run_id, run, found in zip(planned.folders, runs, in_order(_read, runs), strict=True):
        specs[run_id] = _as_run(run.spec, found["settings"])
        read.add(run_id, name, found)
    labels = series_labels(specs)
    for row in read.rows:
        row["series"] = labels[row["run_id"]]
    return read


@dataclass
class _Run:
    """What a run's results are made of."""

    paths: RunPaths
    record_id: str | None
    spec: PlannedRun | None
    state: RunState
    job: Job | None
    alone: bool  # the job is this run's only


def _read(run: _Run) -> dict[str, Any]:
    """What a run's files hold, by the names of Read."""
    records = read_run(run.paths, run.record_id)
    actual = recorded_spec(records)
    spec = as_run(run.spec, actual)
    observed = observed_of(run.paths, records, spec)
    # Where rates may lie in a file that is closed to us, the wall time stands for none of them.
    wall_s = None if records.unreadable else wall_time_s(run.paths, run.state.attempts)
    row = result_row(spec, run.state, records, run.job, observed, wall_s)
    row["ranks_together"] = ranks_together(run.paths, records, spec)
    slurm_j = run.job.energy_j if run.job and run.alone else None
    planned = run.spec.to_dict() if run.spec else {}
    decided = spec.to_dict() if spec and spec is not run.spec else {}
    return {
        "row": row | use_row(records, observed, row, slurm_j),
        "settings": {k: v for k, v in decided.items() if (k, v) not in planned.items()},
        "samples": sample_rows(records.samples),
        "epochs": epoch_rows(records),
        "steps": step_rows(observed) if observed else [],
        "rejected": list(records.rejects),
        "contradicted": unplanned_settings(spec, actual, records),
        "unused": unused_lines(records, observed),
        "lost": records.lost,
        "not_taken": records.epochs_not_taken,
    }


def epoch_rows(records: RunRecords) -> list[Row]:
    """The records of a run's epochs with the program's values, without what identifies the run."""
    whole = ({**_values(r), **r} for r in records.epochs)
    return [{k: v for k, v in r.items() if k not in _DROPPED} for r in whole]


def _values(record: Record) -> Record:
    """The values that a program gave to an epoch."""
    found = record.get("values")
    return found if isinstance(found, dict) else {}


def _as_run(planned: PlannedRun | None, settings: dict[str, Any]) -> PlannedRun | None:
    """The planned settings, with those that the run decided."""
    if not settings:
        return planned
    return read_spec({**(planned.to_dict() if planned else {}), **settings})
