"""Collect a study: its plan and all that its runs left, as two tables.

results = collect("demo")
results.runs       one row for every planned run, whatever became of it
results.epochs     one row a run and epoch
results.ok         whether every run is ok
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.columns import COUNT, EPOCHS, FLAG, NUMBER, RESULTS, TEXT, Column
from jobkit.analysis.records import Reject, RunRecords, read_run
from jobkit.analysis.rows import Row, epoch_rows, recorded_spec, result_row
from jobkit.analysis.series import series_labels
from jobkit.analysis.study import StudyRuns, read_study, run_states
from jobkit.errors import UsageError
from jobkit.paths import StudyPaths, write_whole
from jobkit.studies import find_study


@dataclass(frozen=True)
class Results:
    """What a study's logs say. The columns are those of jobkit.analysis.columns."""

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    rejected: tuple[Reject, ...]  # tagged places in the logs that hold no whole record
    lost: Mapping[str, int]  # by run_id: records that no source holds
    unplanned: tuple[str, ...]  # folders of runs that the plan does not know: not collected

    @property
    def paths(self) -> StudyPaths:
        return StudyPaths(self.folder)

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
        return lines


def collect(study: str | Path | None = None, *, write: bool = True) -> Results:
    """Read a study (a folder, a bare name, or the newest) and write results.csv and epochs.csv.

    Raises UsageError where there is no such study, or its plan or folder cannot be used.
    """
    planned = read_study(find_study(study))
    rows, epochs, records = _rows(planned)
    results = Results(
        folder=planned.paths.folder,
        runs=_frame(rows, RESULTS),
        epochs=_frame(epochs, EPOCHS),
        rejected=tuple(reject for r in records.values() for reject in r.rejects),
        lost={run_id: r.lost for run_id, r in records.items() if r.lost},
        unplanned=planned.unplanned,
    )
    if write:
        _write(planned.paths.results, results.runs)
        _write(planned.paths.epochs, results.epochs)
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


def _frame(rows: list[Row], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a table with every column, each of its type, and at the end any others they have."""
    known = {c.name: c.dtype for c in columns}
    others = sorted({str(name) for row in rows for name in row} - known.keys())
    dtypes = known | {name: _guess(row.get(name) for row in rows) for name in others}
    cells = {k: [_fit(row.get(k), dtype) for row in rows] for k, dtype in dtypes.items()}
    return pd.DataFrame({k: pd.Series(cells[k], dtype=dtype) for k, dtype in dtypes.items()})


def _guess(values: Iterable[Any]) -> str:
    """The type of a column that a foreign script made."""
    return NUMBER if {type(v) for v in values} <= {int, float, type(None)} else TEXT


def _fit(value: Any, dtype: str) -> Any:
    """A value as a column of this type takes it; None where it is something else."""
    if isinstance(value, bool) and dtype != FLAG:
        return str(value) if dtype == TEXT else None
    if dtype == TEXT:
        return None if value is None else str(value)
    if dtype == NUMBER and type(value) is int:
        return float(value)
    fits = {COUNT: int, NUMBER: float}.get(dtype, bool)
    return value if type(value) is fits else None


def _write(path: Path, frame: pd.DataFrame) -> None:
    """Write a table whole, at full precision; raises UsageError where that cannot be done."""
    try:
        write_whole(path, frame.to_csv(index=False, lineterminator="\n"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
