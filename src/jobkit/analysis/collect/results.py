"""Collect a study: its plan and the records of its runs, as three tables.

results = collect("demo")       from the logs; writes the tables
results = Results.load("demo")  from the tables as they were written
results.runs       one row per planned run, whatever its status
results.epochs     one row per run and epoch
results.scaling    one row per series and size
results.sizes      the same as objects, with the values of each repeat
results.ok         whether every run is ok
"""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pandas as pd

from jobkit.analysis.collect.given_logs import GivenLogs, read_logs
from jobkit.analysis.collect.measured import OF_EPOCHS, WALL_TIME
from jobkit.analysis.collect.reading import (
    NOT_OF_EPOCH,
    NOT_OF_ROW,
    OF_EPOCH,
    OF_RUN,
    Read,
    read_runs,
)
from jobkit.analysis.collect.records import Reject
from jobkit.analysis.collect.study import read_study
from jobkit.analysis.scaling.scaling import measured_sizes, scaling_table
from jobkit.analysis.scaling.sizes import SEVERAL_STARTS, Size
from jobkit.analysis.tables.column import Column
from jobkit.analysis.tables.columns import EPOCHS, RESULTS, SAMPLES, SCALING, STEPS
from jobkit.analysis.tables.comparable import apart, faults
from jobkit.analysis.tables.frames import MOST_OTHERS, Row, frame
from jobkit.analysis.tables.products import read_table, save_table
from jobkit.analysis.tables.text import counted
from jobkit.errors import one_line
from jobkit.files import is_there
from jobkit.paths import StudyPaths
from jobkit.permissions import closed_to_others, other_writers
from jobkit.spec.study import find_study

OUTDATED = "a run has written to its log since the tables were: collect again"


@dataclass(frozen=True)
class Results:
    """The tables of a study. The columns are those of jobkit.analysis.tables.columns."""

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    sizes: tuple[Size, ...]  # every series at every size; their table is scaling
    scaling: pd.DataFrame
    steps: pd.DataFrame  # some steps a row
    samples: pd.DataFrame = field(default_factory=pd.DataFrame)  # of load, memory and energy
    # Of the logs, as far as they were read just now; runs["problems"] has their words.
    rejected: tuple[Reject, ...] = ()  # [METRIC] lines that are no valid record
    lost: Mapping[str, int] = field(default_factory=dict)  # by run_id: records in no source
    unplanned: tuple[str, ...] = ()  # folders of runs that are not in the plan: not collected
    columns_left_out: int = 0  # of epochs: values that foreign scripts name beyond a bound

    @classmethod
    def load(cls, study: str | Path | None = None) -> "Results":
        """The tables of a study as they were written; a study that has none is collected.

        Raises UsageError where there is no such study, or a file is no table.
        """
        folder = find_study(study)
        paths = StudyPaths(folder)
        if not is_there(paths.results):
            return collect(folder, write=os.access(folder, os.W_OK))
        runs, epochs, steps, samples = (
            read_table(path, columns, within=folder)
            for path, columns in (
                (paths.results, RESULTS),
                (paths.epochs, EPOCHS),
                (paths.steps, STEPS),
                (paths.samples, SAMPLES),
            )
        )
        targets = read_table(paths.scaling, SCALING, within=folder)["target_accuracy"].dropna()
        sizes = measured_sizes(runs, epochs, float(targets.iloc[0]) if len(targets) else None)
        scaling = scaling_table(sizes, runs["study"].iloc[0] if len(runs) else None)
        return cls(folder, runs, epochs, tuple(sizes), scaling, steps, samples)

    @property
    def is_outdated(self) -> bool:
        """Whether a run has written to its log since the tables were."""
        written = self.paths.results.stat().st_mtime
        return any(log.lstat().st_mtime > written for log in self.folder.glob("*/train.log"))

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
        tables = {paths.results: self.runs, paths.epochs: self.epochs}
        if len(self.steps):
            tables[paths.steps] = self.steps
        if len(self.samples):
            tables[paths.samples] = self.samples
        return {**tables, paths.scaling: self.scaling}

    @property
    def ok(self) -> bool:
        """Whether every planned run is ok."""
        return bool((self.runs["status"] == "ok").all())

    def of_warmup_alone(self) -> list[str]:
        """The runs, by run_id, whose rate is that of steps of the warm-up."""
        of_steps = self.steps.dropna(subset=["warmup"]).groupby("run_id", sort=False)["warmup"]
        alone = {str(run_id) for run_id, every in of_steps.all().items() if every}
        if not alone:
            return []
        by_steps = ~self.runs["throughput_source"].isin([OF_EPOCHS, WALL_TIME])
        measured = self.runs.loc[by_steps & self.runs["throughput"].notna(), "run_id"]
        return [str(run_id) for run_id in measured if run_id in alone]

    def _started_again(self) -> list[str]:
        """The runs, by run_id, that are ok after several starts and measured no rate."""
        runs = self.runs
        found = (runs["status"] == "ok") & runs["attempts"].gt(1).fillna(False)
        return list(runs.loc[found & runs["throughput"].isna(), "run_id"].astype(str))

    def warnings(self) -> list[str]:
        """Problems of the logs and of the comparison, one line each."""
        texts = self.runs["problems"].dropna()
        lines = [line for text in texts for line in text.split(" | ")]
        lines += [
            f"{k}: all steps measured are of the warm-up, so its rate is theirs: train for longer, "
            "or lower warmup_steps (steps after the last window are lost where a program ends by "
            "os._exit or a signal)"
            for k in self.of_warmup_alone()
        ]
        lines += [f"{k}: {SEVERAL_STARTS}" for k in self._started_again()]
        above = list(self.runs.loc[self.runs["val_accuracy"].gt(1), "run_id"])
        if above:
            of = f"{counted(len(above), 'run')}, as {above[0]}"
            lines.append(f"val_accuracy is above 1 in {of}: it is a share, as 0.93 for 93 %")
        if self.unplanned:
            lines.append(f"not in the plan, so not collected: {', '.join(self.unplanned)}")
        if self.columns_left_out:
            lines.append(
                f"epochs.csv: {counted(self.columns_left_out, 'column')} left out: of the names "
                f"that are not jobkit's own the first {MOST_OTHERS} are columns"
            )
        if other_writers(self.folder) == "everybody":
            lines.append(f"{self.name} is world-writable: anybody may have changed its files")
        devices = self.runs["device"].dropna().value_counts()
        if len(devices) > 1:
            shown = ", ".join(f"{name} ({counted(n, 'run')})" for name, n in devices.items())
            lines.append(f"the runs used different devices, which differ in speed: {shown}")
        lines += [f"{series}: not compared: {why}" for series, why in faults(self.runs).items()]
        return [one_line(line) for line in lines]  # with names of files and folders


@closed_to_others()
def collect(
    study: str | Path | None = None,
    *,
    write: bool = True,
    accuracy: float | None = None,
    separate: bool = False,
) -> Results:
    """Read a study (a folder, a bare name, or the newest) and write its three tables.

    accuracy: the target of time_to_accuracy_s; None: what every run that is ok has reached.
    separate: device models and commits of the code that differ are series of their own.
    Raises UsageError where there is no such study, or its plan or folder cannot be used.
    """
    folder = find_study(study)
    paths = StudyPaths(folder)
    unplanned: tuple[str, ...] = ()
    with _no_garbage():
        if paths.given_logs.exists():
            read = _read_logs(paths)
        else:
            planned = read_study(folder)
            read, unplanned = read_runs(planned), planned.unplanned
        runs = frame(read.rows, RESULTS)
        runs["series"] = apart(runs) if separate else runs["series"]
        epochs = _of_runs(runs, read.epochs, EPOCHS, OF_EPOCH, NOT_OF_EPOCH)
        steps = _of_runs(runs, read.steps, STEPS, _own(STEPS), NOT_OF_ROW)
        samples = _of_runs(runs, read.samples, SAMPLES, _own(SAMPLES), NOT_OF_ROW)
    sizes = measured_sizes(runs, epochs, accuracy)
    results = Results(
        folder=folder,
        runs=runs,
        epochs=epochs,
        steps=steps,
        samples=samples,
        sizes=tuple(sizes),
        scaling=scaling_table(sizes, runs["study"].iloc[0] if len(runs) else None),
        rejected=tuple(read.rejected),
        lost=read.lost,
        unplanned=unplanned,
        columns_left_out=epochs.attrs.pop("left_out"),
    )
    if write:
        for path, table in results.tables.items():
            save_table(path, table)
    return results


def _read_logs(paths: StudyPaths) -> Read:
    """Read the logs that logs.json names."""
    return read_logs(GivenLogs.read(paths.given_logs), paths.folder.resolve().name)


def _of_runs(
    runs: pd.DataFrame,
    parts: list[list[Row]],
    columns: tuple[Column, ...],
    own: tuple[Column, ...],
    left_out: Iterable[str],
) -> pd.DataFrame:
    """A table with rows of each run.

    own: the columns that are of a row; the others identify its run. Values that a program names
    itself keep their names, but for those left out.
    """
    keys = [c.name for c in columns if c not in own]
    values = frame([*chain.from_iterable(parts)], own, left_out)
    of_run = runs[keys].loc[runs.index.repeat([*map(len, parts)])]
    table = pd.concat([of_run.reset_index(drop=True), values], axis=1)
    table = table[[*(c.name for c in columns), *values.columns[len(own) :]]]
    table.attrs = values.attrs
    return table


def _own(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns of a table that do not identify the run."""
    return tuple(c for c in columns if c.name not in OF_RUN)


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
