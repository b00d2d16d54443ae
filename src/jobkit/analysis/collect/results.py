"""Collect a study: its plan and the records of its runs, as three tables.

results = collect("demo")
results.runs       one row per planned run, whatever its status
results.epochs     one row per run and epoch
results.scaling    one row per series and size
results.sizes      the same as objects, with the values of each repeat
results.ok         whether every run is ok
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from jobkit.analysis.collect.records import Reject, read_run
from jobkit.analysis.collect.rows import as_run, result_row, unplanned_settings
from jobkit.analysis.collect.study import StudyRuns, read_study, run_states
from jobkit.analysis.scaling.scaling import measured_sizes, scaling_table
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.columns import EPOCHS, RESULTS
from jobkit.analysis.tables.comparable import faults
from jobkit.analysis.tables.frames import Row, frame
from jobkit.analysis.tables.products import save_table
from jobkit.analysis.tables.series import series_labels
from jobkit.analysis.tables.text import counted
from jobkit.errors import one_line
from jobkit.metric.line import COMMON, KINDS, Record
from jobkit.paths import StudyPaths
from jobkit.permissions import closed_to_others, other_writers
from jobkit.spec.studies import find_study


@dataclass(frozen=True)
class Results:
    """The tables of a study. The columns are those of jobkit.analysis.tables.columns."""

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    sizes: tuple[Size, ...]  # every series at every size; their table is scaling
    scaling: pd.DataFrame
    rejected: tuple[Reject, ...]  # [METRIC] lines that are no valid record
    lost: Mapping[str, int]  # by run_id: records missing in every source
    contradicted: Mapping[str, str]  # by run_id: recorded settings that differ from the plan
    unplanned: tuple[str, ...]  # folders of runs that are not in the plan: not collected

    @property
    def name(self) -> str:
        """The study's name: its folder's, as text that is safe to print."""
        return one_line(self.folder.resolve().name)

    @property
    def paths(self) -> StudyPaths:
        return StudyPaths(self.folder)

    @property
    def tables(self) -> dict[Path, pd.DataFrame]:
        """Where each table is written."""
        paths = self.paths
        return {paths.results: self.runs, paths.epochs: self.epochs, paths.scaling: self.scaling}

    @property
    def ok(self) -> bool:
        """Whether every planned run is ok."""
        return bool((self.runs["status"] == "ok").all())

    def warnings(self) -> list[str]:
        """Problems of the logs and of the comparison, one line each."""
        lines = [
            f"{r.file}: {counted(r.count, '[METRIC] line')} rejected, the first"
            f"{'' if r.offset is None else f' at byte {r.offset}'}: {r.reason}"
            for r in self.rejected
        ]
        lines += [f"{k}: {counted(n, 'record')} lost" for k, n in self.lost.items()]
        lines += [f"{k}: not run as planned: {what}" for k, what in self.contradicted.items()]
        if self.unplanned:
            lines.append(f"not in the plan, so not collected: {', '.join(self.unplanned)}")
        if other_writers(self.folder) == "everybody":
            lines.append(f"{self.name} is world-writable: anybody may have changed its files")
        devices = self.runs["device"].dropna().value_counts()
        if len(devices) > 1:
            shown = ", ".join(f"{name} ({counted(n, 'run')})" for name, n in devices.items())
            lines.append(f"the runs used different devices, so they are not comparable: {shown}")
        lines += [f"{series}: not compared: {why}" for series, why in faults(self.runs).items()]
        return lines


@closed_to_others()
def collect(
    study: str | Path | None = None, *, write: bool = True, accuracy: float | None = None
) -> Results:
    """Read a study (a folder, a bare name, or the newest) and write its three tables.

    accuracy: the target of time_to_accuracy_s; None: what every run that is ok has reached.
    Raises UsageError where there is no such study, or its plan or folder cannot be used.
    """
    planned = read_study(find_study(study))
    with _no_garbage():
        read = _read(planned)
        runs = frame(read.rows, RESULTS)
        epochs = _epoch_table(runs, read.epochs)
    sizes = measured_sizes(runs, epochs, accuracy)
    results = Results(
        folder=planned.paths.folder,
        runs=runs,
        epochs=epochs,
        sizes=tuple(sizes),
        scaling=scaling_table(sizes, runs["study"].iloc[0] if len(runs) else None),
        rejected=tuple(read.rejected),
        lost=read.lost,
        contradicted=read.contradicted,
        unplanned=planned.unplanned,
    )
    if write:
        for path, table in results.tables.items():
            save_table(path, table)
    return results


@dataclass
class _Read:
    """What was read of all runs, in the order of the plan."""

    rows: list[Row] = field(default_factory=list)
    epochs: list[list[Record]] = field(default_factory=list)
    rejected: list[Reject] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    contradicted: dict[str, str] = field(default_factory=dict)


def _read(planned: StudyRuns) -> _Read:
    """Read every run; keep only the epochs of its records."""
    # States first: a run that ends in between is then running with all its records, not ok
    # without some.
    joined = run_states(planned)
    read, specs = _Read(), {}
    name = planned.paths.folder.resolve().name
    for run_id, paths in planned.folders.items():
        records = read_run(paths, planned.record_ids[run_id])
        spec = specs[run_id] = as_run(planned.specs[run_id], records)
        row = result_row(spec, joined.states[run_id], records, joined.jobs.get(run_id))
        read.rows.append(row | {"run_id": run_id, "study": name})
        read.epochs.append(records.epochs)
        read.rejected += records.rejects
        if other := unplanned_settings(spec, records):
            read.contradicted[run_id] = other
        if records.lost:
            read.lost[run_id] = records.lost
    labels = series_labels(specs)
    for row in read.rows:
        row["series"] = labels[row["run_id"]]
    return read


def _epoch_table(runs: pd.DataFrame, epochs: list[list[Record]]) -> pd.DataFrame:
    """A row for each run and epoch: what identifies the run, and the epoch's record.

    Values that a foreign script names in its own way keep their names.
    """
    own = tuple(c for c in EPOCHS if c.name in (*KINDS["epoch"], "attempt"))
    keys = [c.name for c in EPOCHS if c not in own]
    values = frame([r for e in epochs for r in e], own, {*COMMON, "part", "parts", *keys})
    of_run = runs[keys].loc[runs.index.repeat([len(e) for e in epochs])]
    table = pd.concat([of_run.reset_index(drop=True), values], axis=1)
    return table[[*(c.name for c in EPOCHS), *values.columns[len(own) :]]]


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause the garbage collector: records have no cycles, and the search takes half the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
