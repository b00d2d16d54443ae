"""Collect a study: its plan and all that its runs left, as three tables.

results = collect("demo")
results.runs       one row for every planned run, whatever became of it
results.epochs     one row a run and epoch
results.scaling    one row a series and size
results.ok         whether every run is ok
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from jobkit.analysis.columns import EPOCHS, RESULTS
from jobkit.analysis.comparable import faults
from jobkit.analysis.frames import frame
from jobkit.analysis.products import Products, save
from jobkit.analysis.records import Reject, RunRecords, read_run
from jobkit.analysis.rows import Row, epoch_rows, recorded_spec, result_row
from jobkit.analysis.scaling import scaling
from jobkit.analysis.series import series_labels
from jobkit.analysis.study import StudyRuns, read_study, run_states
from jobkit.paths import StudyPaths
from jobkit.studies import find_study


@dataclass(frozen=True)
class Results:
    """What a study's logs say. The columns are those of jobkit.analysis.columns."""

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    scaling: pd.DataFrame
    rejected: tuple[Reject, ...]  # tagged places in the logs that hold no whole record
    lost: Mapping[str, int]  # by run_id: records that no source holds
    unplanned: tuple[str, ...]  # folders of runs that the plan does not know: not collected

    @property
    def paths(self) -> StudyPaths:
        return StudyPaths(self.folder)

    @property
    def tables(self) -> dict[Path, pd.DataFrame]:
        """Where each table is written."""
        scaled = Products(self.folder).scaling
        return {self.paths.results: self.runs, self.paths.epochs: self.epochs, scaled: self.scaling}

    @property
    def ok(self) -> bool:
        """Whether every planned run is ok."""
        return bool((self.runs["status"] == "ok").all())

    def warnings(self) -> list[str]:
        """What is not right with the logs themselves, a line each."""
        lines = [
            f"{r.file}: {r.count} tagged {_plural(r.count, 'place')} rejected, "
            f"the first at byte {r.offset}: {r.reason}"
            for r in self.rejected
        ]
        lines += [f"{k}: {n} {_plural(n, 'record')} lost" for k, n in self.lost.items()]
        if self.unplanned:
            lines.append(f"not in the plan, so not collected: {', '.join(self.unplanned)}")
        devices = self.runs["device"].dropna().value_counts()
        if len(devices) > 1:
            shown = ", ".join(f"{name} ({n} {_plural(n, 'run')})" for name, n in devices.items())
            lines.append(f"the runs used different devices, compare with care: {shown}")
        lines += [f"{series}: not compared: {why}" for series, why in faults(self.runs).items()]
        return lines


def collect(
    study: str | Path | None = None, *, write: bool = True, accuracy: float | None = None
) -> Results:
    """Read a study (a folder, a bare name, or the newest) and write its three tables.

    accuracy: what the time to it is to be told of; None: what every run that is ok has reached.
    Raises UsageError where there is no such study, or its plan or folder cannot be used.
    """
    planned = read_study(find_study(study))
    rows, epochs, records = _rows(planned)
    run_frame, epoch_frame = frame(rows, RESULTS), frame(epochs, EPOCHS)
    results = Results(
        folder=planned.paths.folder,
        runs=run_frame,
        epochs=epoch_frame,
        scaling=scaling(run_frame, epoch_frame, accuracy),
        rejected=tuple(reject for r in records.values() for reject in r.rejects),
        lost={run_id: r.lost for run_id, r in records.items() if r.lost},
        unplanned=planned.unplanned,
    )
    if write:
        for path, table in results.tables.items():
            save(path, table.to_csv(index=False, lineterminator="\n"))
    return results


def _rows(planned: StudyRuns) -> tuple[list[Row], list[Row], dict[str, RunRecords]]:
    """The rows of both tables, in the order of the plan, and the records behind them."""
    # States first: what ends in between is then running with all its records, not ok without one.
    states, jobs = run_states(planned)
    records = {k: read_run(p, planned.record_ids[k]) for k, p in planned.folders.items()}
    specs = {k: spec or recorded_spec(records[k]) for k, spec in planned.specs.items()}
    labels = series_labels(specs)
    rows, epochs = [], []
    for run_id, spec in specs.items():
        key = {"run_id": run_id, "study": planned.paths.folder.resolve().name}
        row = result_row(spec, states[run_id], records[run_id], jobs.get(run_id))
        row |= {**key, "series": labels[run_id]}
        rows.append(row)
        epochs += epoch_rows(row, records[run_id])
    return rows, epochs, records


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
