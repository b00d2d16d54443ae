"""Collect a study: its plan and the records of its runs, as tables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.collect import rows
from jobkit.analysis.collect.logs import GivenLogs, read_logs
from jobkit.analysis.collect.records import read_run
from jobkit.analysis.collect.samples import use_row
from jobkit.analysis.scaling.scaling import measured_sizes, scaling_table
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.columns import RESULTS, TABLES
from jobkit.analysis.tables.frames import Row, frame, read_table, records, save_table
from jobkit.analysis.tables.series import faults, odd_works, series_labels
from jobkit.errors import UsageError, one_line
from jobkit.files import is_there
from jobkit.metric.pattern import load_pattern
from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import RunState, join, ordered_runs
from jobkit.paths import RunPaths, StudyPaths, read_json
from jobkit.permissions import closed_to_others, other_writers
from jobkit.spec.command import PlannedRun
from jobkit.spec.study import Plan, find_study, read_run_spec, run_folders

OUTDATED = "a run has written to its log since the tables were: collect again"


@dataclass(frozen=True, eq=False)  # what is found in them is kept by their identity
class Results:
    """The tables of a study. The columns are those of jobkit.analysis.tables.columns."""

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    steps: pd.DataFrame  # some steps a row
    accuracy: float | None = None  # target of time_to_accuracy_s; None: what all ok runs reached
    out: Path | None = None  # where tables, figures and the report are written; None: folder

    @classmethod
    def load(cls, study: str | Path | None = None, out: Path | None = None) -> "Results":
        """The tables of a study as they were written; a study that has none is collected.

        out: a folder in place of the study's, where tables are looked for first. Raises UsageError
        where there is no such study, or a file is no table.
        """
        folder = find_study(study)
        places = [place for place in (out, folder) if place and is_there(place / "results.csv")]
        if not places:
            return collect(folder, write=os.access(out or folder, os.W_OK), out=out)
        runs, epochs, steps, of_sizes = (
            read_table(places[0] / f"{name}.csv", TABLES[name], within=places[0])
            for name in ("results", "epochs", "steps", "scaling")
        )
        targets = of_sizes["target_accuracy"].dropna()
        accuracy = float(targets.iloc[0]) if len(targets) else None
        return cls(folder, runs, epochs, steps, accuracy, out)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """Every series at every size, compared with its base."""
        return tuple(measured_sizes(self.runs, self.epochs, self.accuracy))

    @cached_property
    def scaling(self) -> pd.DataFrame:
        """The table of sizes."""
        return scaling_table(self.sizes, next(iter(self.runs["study"]), None))

    @property
    def is_outdated(self) -> bool:
        """Whether a run has written to its log since the tables were."""
        written = next(filter(is_there, [self.output.results, self.paths.results])).stat().st_mtime
        return any(log.lstat().st_mtime > written for log in self.folder.glob("*/train.log"))

    @property
    def name(self) -> str:
        """The study's name: its folder's, as text that is safe to print."""
        return one_line(self.folder.resolve().name)

    @property
    def paths(self) -> StudyPaths:
        """The files of the study: its plan and runs."""
        return StudyPaths(self.folder)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """The rows of runs by run_id, as Python's values and without empty columns."""
        return {str(row["run_id"]): row for row in records(self.runs.dropna(axis=1, how="all"))}

    @property
    def output(self) -> StudyPaths:
        """The files that are written: tables, figures, report."""
        return StudyPaths(self.out or self.folder)

    @property
    def ok(self) -> bool:
        """Whether every planned run is ok."""
        return bool((self.runs["status"] == "ok").all())

    def warnings(self) -> list[str]:
        """Problems of the logs and of the comparison, one line each."""
        lines = [line for text in self.runs["problems"].dropna() for line in text.split(" | ")]
        lines += [f"{series}: not compared: {why}" for series, why in faults(self.runs).items()]
        lines += odd_works(self.runs)
        return [one_line(line) for line in lines]  # with names of files and folders


def make_own(folder: Path) -> None:
    """Make a folder where it is absent, to write there.

    Raises UsageError for one that another user owns, or into which everybody may write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from None
    link = folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid())
    writers = "another user" if link else other_writers(folder)
    if writers not in ("", "its group"):
        raise UsageError(f"{folder}: {writers} may write there: name your own with --out DIR")


@closed_to_others()
def collect(
    study: str | Path | None = None,
    *,
    write: bool = True,
    accuracy: float | None = None,
    logs: GivenLogs | None = None,
    out: Path | None = None,
) -> Results:
    """Read a study (a folder, a bare name, or the newest) and write its tables.

    accuracy: the target of time_to_accuracy_s; None: what every run that is ok has reached.
    logs: the runs, in place of those of the study's folder. out: the folder of the tables, made
    where it is absent; None: the study's. Raises UsageError where there is no such study, where its
    plan cannot be used, or where its folder is not this user's own.
    """
    folder = Path(study) if logs and study else find_study(study)
    if write:
        make_own(out or folder)
    if is_there(folder / "logs.json") and not logs:
        raise UsageError(f"{folder} was made from logs: give collect --logs again")
    read = read_logs(logs) if logs else _read_study(folder)
    tables = _tables(read, folder.resolve().name)
    runs, epochs, steps = (tables[name] for name in ("results", "epochs", "steps"))
    results = Results(folder, runs, epochs, steps, accuracy, out)
    if write:
        for name, table in (tables | {"scaling": results.scaling}).items():
            if len(table) or name not in ("steps", "samples"):
                save_table(results.output.folder / f"{name}.csv", table)
    return results


def _tables(read: Mapping[str, dict[str, Any]], study: str) -> dict[str, pd.DataFrame]:
    """The tables of what was read of each run, in the order of the plan, by the file's name."""
    for run_id, run in read.items():
        problems = " | ".join(line.replace(" | ", " / ") for line in run["problems"])
        run["row"] |= {"run_id": run_id, "study": study, "problems": problems or None}
    made = [rows.steps_of_ranks(run["row"]) for run in read.values()]
    rows.rate_alike(made)
    # Settings that all runs share are in spec.json and in no column.
    names = set[str]().union(*made) - {c.name for c in RESULTS}
    shared = {name for name in names if len({repr(row.get(name)) for row in made}) < 2}
    tables = {"results": (runs := frame(made, RESULTS, shared))}
    for name in ("epochs", "steps", "samples"):
        keys = records(runs[[c.name for c in TABLES[name] if c.name in rows.OF_RUN]])
        pairs = zip(keys, read.values(), strict=True)
        made = [row | own for own, run in pairs for row in run[name]]
        # Values that a program names itself keep their names.
        tables[name] = frame(made, TABLES[name], rows.IDENTIFIES)
    return tables


def _read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """What was read of every run that is planned or, without a plan, that has a folder.

    Raises UsageError where the plan cannot be read.
    """
    paths = StudyPaths(folder)
    specs: dict[str, PlannedRun | None]
    if paths.plan.exists():
        specs = {**Plan.read(paths.plan).runs}
        folders, record_ids = {run_id: paths.run(run_id) for run_id in specs}, {k: k for k in specs}
        ordered = ordered_runs(paths, specs)
    else:
        present, ordered = run_folders(folder), set()
        folders = {f.name: RunPaths(f) for f in present}
        specs = {f.name: read_run_spec(f) for f in present}
        # A run's records carry its id also after its folder was renamed.
        ids = {f.name: (read_json(f / "spec.json") or {}).get("run_id") for f in present}
        record_ids = {name: v for name, v in ids.items() if isinstance(v, str)}
    # States first: a run that ends in between is then running with all its records, not ok
    # without some.
    states, _ = join(folders, ordered, slurm_jobs.ask)
    read = {
        name: _read(path, record_ids.get(name), specs[name], states[name])
        for name, path in folders.items()
    }
    for run_id, label in series_labels(specs).items():
        read[run_id]["row"]["series"] = label
    return read


def _read(
    paths: RunPaths, record_id: str | None, planned: PlannedRun | None, state: RunState
) -> dict[str, Any]:
    """A run's rows in each table, and its problems; record_id: of its records, None: of any."""
    records = read_run(paths, record_id)
    spec = planned and planned.decided(rows.object_of(records.last("run_start"), "spec"))
    name, ranks = getattr(spec, "pattern", None), getattr(spec, "world_size", None)
    pattern = load_pattern(name) if name else None
    observed = rows.observed_of(paths.log, paths.folder.parent, records, spec, pattern, ranks)
    # Where rates may lie in a file that is closed to us, the wall time stands for none of them.
    job = read_json(paths.job) or {}
    wall_s = None if records.unreadable else rows.wall_time_s(job, state.attempts)
    row = rows.result_row(spec, state, records, observed, wall_s)
    row["ranks_together"] = rows.ranks_together(job, records, spec)
    row |= use_row(records, observed, row)
    by_it = str(row.get("throughput_source")).startswith(("pattern", "meter"))
    if pattern and state.status == "ok" and not by_it:
        records.problems.append(f"{paths.log.parent.name}: no line matches pattern {name}")
    return rows.of_tables(paths.folder.name, records, observed, row)
