"""The planned runs of a study, and the state of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.outcome import slurm_jobs
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.status import RunState, is_alive, run_state
from jobkit.paths import RunPaths, StudyPaths, read_job, read_json
from jobkit.spec.plan import Plan
from jobkit.spec.runspec import RunSpec
from jobkit.spec.studies import run_folders


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study: all that are planned or, without a plan, all that have a folder."""

    paths: StudyPaths
    specs: dict[str, RunSpec | None]  # by run_id; None: no readable spec
    folders: dict[str, RunPaths]
    record_ids: dict[str, str | None]  # the run_id that a run's records carry; None: any
    unplanned: tuple[str, ...] = ()  # folders of runs that are not in the plan
    launched: frozenset[str] = frozenset()  # runs that a running launcher will start


def read_study(folder: Path) -> StudyRuns:
    """The runs of a study's folder; raises UsageError where its plan cannot be read."""
    paths = StudyPaths(folder)
    present = run_folders(folder)
    if not paths.plan.exists():
        return StudyRuns(
            paths,
            {f.name: _own_spec(f) for f in present},
            {f.name: RunPaths(f) for f in present},
            {f.name: _own_id(f) for f in present},
        )
    planned = Plan.read(paths.plan).runs
    return StudyRuns(
        paths,
        dict(planned),
        {run_id: paths.run(run_id) for run_id in planned},
        {run_id: run_id for run_id in planned},
        tuple(f.name for f in present if f.name not in planned),
        _launched(paths, planned),
    )


def _launched(paths: StudyPaths, planned: Mapping[str, RunSpec]) -> frozenset[str]:
    """The runs of a launcher that is running on this machine."""
    record = read_json(paths.launcher)
    if not record or not is_alive(record):
        return frozenset()
    return frozenset(planned) & frozenset(record.get("run_ids", planned))


def run_states(planned: StudyRuns) -> tuple[dict[str, RunState], dict[str, Job]]:
    """The state of each run, by its files and Slurm; and Slurm's data on its job."""
    states = {k: run_state(p, k in planned.launched) for k, p in planned.folders.items()}
    records = {k: read_job(p) or {} for k, p in planned.folders.items()}
    ids = {k: str(r["job_id"]) for k, r in records.items() if r.get("job_id")}
    said = slurm_jobs.ask(ids.values()) if ids else {}
    jobs = {k: said[job_id] for k, job_id in ids.items() if job_id in said}
    for k, job in jobs.items():
        states[k] = slurm_jobs.merged(states[k], job, bool(records[k].get("shared")))
    return states, jobs


def _own_id(folder: Path) -> str | None:
    """The run_id that a run's records carry, also after its folder was renamed."""
    said = (read_json(folder / "spec.json") or {}).get("run_id")
    return said if isinstance(said, str) else None


def _own_spec(folder: Path) -> RunSpec | None:
    """The spec that lies in a run's folder, where this version can read it."""
    try:
        return RunSpec.from_dict((read_json(folder / "spec.json") or {})["spec"])
    except (KeyError, TypeError, AttributeError, UsageError):
        return None
