"""The planned runs of a study, and the state of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import Joined, join, ordered_runs
from jobkit.paths import RunPaths, StudyPaths, read_json
from jobkit.spec.runspec import PlannedRun
from jobkit.spec.study import Plan, own_spec, run_folders


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study: all that are planned or, without a plan, all that have a folder."""

    paths: StudyPaths
    specs: dict[str, PlannedRun | None]  # by run_id; None: no readable spec
    folders: dict[str, RunPaths]
    record_ids: dict[str, str | None]  # the run_id that a run's records carry; None: any
    unplanned: tuple[str, ...] = ()  # folders of runs that are not in the plan
    ordered: Mapping[str, float] = field(default_factory=dict)  # what a launcher is to start: when


def read_study(folder: Path) -> StudyRuns:
    """The runs of a study's folder; raises UsageError where its plan cannot be read."""
    paths = StudyPaths(folder)
    if not paths.plan.exists():
        present = run_folders(folder)
        return StudyRuns(
            paths,
            {f.name: own_spec(f) for f in present},
            {f.name: RunPaths(f) for f in present},
            {f.name: _own_id(f) for f in present},
        )
    planned = Plan.read(paths.plan).runs
    return StudyRuns(
        paths,
        dict(planned),
        {run_id: paths.run(run_id) for run_id in planned},
        {run_id: run_id for run_id in planned},
        tuple(f.name for f in run_folders(folder, but=planned)),
        ordered_runs(paths, planned),
    )


def run_states(planned: StudyRuns) -> Joined:
    """The state of each run, by its files and Slurm; and Slurm's data on its job."""
    return join(planned.folders, planned.ordered, slurm_jobs.ask)


def _own_id(folder: Path) -> str | None:
    """The run_id that a run's records carry, also after its folder was renamed."""
    said = (read_json(folder / "spec.json") or {}).get("run_id")
    return said if isinstance(said, str) else None
