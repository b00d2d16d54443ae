"""The states of the runs of a study: from their files, joined with Slurm's job states."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jobkit.files import in_order
from jobkit.outcome.facts import read, read_job, seconds
from jobkit.outcome.slurm_jobs import GONE, Job, cluster, merged
from jobkit.outcome.status import UNDER_WAY, RunState, judge
from jobkit.paths import RunPaths, StudyPaths, read_json
from jobkit.processes import is_alive

Ask = Callable[[Iterable[str]], Mapping[str, Job]]  # what Slurm says of jobs, by their ids


@dataclass
class Joined:
    """The state of each run, and Slurm's data on its job where there is any."""

    states: dict[str, RunState] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)


def join(
    runs: Mapping[str, RunPaths],
    ordered: Mapping[str, float],
    ask: Ask,
    all_jobs: bool = True,
    here: Callable[[], str | None] = cluster,
) -> Joined:
    """Return the state of each run.

    ordered: of ordered_runs, asked before. all_jobs: ask after the jobs of runs that are ok too.
    here: the name of the cluster that is asked, None if not known.
    """
    found, starts = Joined(), dict[str, Mapping[str, Any] | None]()
    for run_id, (state, start) in zip(
        runs, in_order(partial(_look, ordered), [*runs.items()]), strict=True
    ):
        found.states[run_id], starts[run_id] = state, start
    ids = {
        run_id: job_id
        for run_id, start in starts.items()
        if (job_id := slurm_job_id(start)) and (all_jobs or found.states[run_id].status != "ok")
    }
    ids = _of_cluster(ids, starts, here)
    said = ask(ids.values()) if ids else {}
    for run_id, job_id in ids.items():
        if (job := said.get(job_id)) is None:
            continue
        start, state = starts[run_id], found.states[run_id]
        if has_ended(job) and state.status != "ok":
            # It may have ended well between the look at its files and Slurm's answer.
            state, start = _look(ordered, (run_id, runs[run_id]))
        if slurm_job_id(start) == job_id:  # else it was started again meanwhile
            found.jobs[run_id] = job
            state = merged(state, job, bool((start or {}).get("shared")))
        found.states[run_id] = state
    return found


def _look(
    ordered: Mapping[str, float], run: tuple[str, RunPaths]
) -> tuple[RunState, Mapping[str, Any] | None]:
    """The state of a run by its files alone; and who runs its newest start."""
    run_id, paths = run
    facts = read(paths)
    return judge(facts, ordered.get(run_id)), facts.job


def _of_cluster(
    ids: dict[str, str],
    starts: Mapping[str, Mapping[str, Any] | None],
    here: Callable[[], str | None],
) -> dict[str, str]:
    """The ids without those of another cluster, whose numbers other jobs have here.

    Where this cluster's name is not known, each cluster that is noted may be another one.
    """
    noted = {run_id: (starts[run_id] or {}).get("cluster") for run_id in ids}
    name = here() if any(noted.values()) else None
    return {run_id: job_id for run_id, job_id in ids.items() if noted[run_id] in (None, name)}


def has_ended(job: Job) -> bool:
    """Whether Slurm says that a job is over."""
    return job.state == GONE or (bool(job.status) and job.status not in UNDER_WAY)


def slurm_job_id(start: Mapping[str, Any] | None) -> str | None:
    """The Slurm job of a run's newest start, by who runs that."""
    job_id = (start or {}).get("job_id")
    return str(job_id) if job_id else None


def job_ids(runs: Iterable[RunPaths]) -> list[str]:
    """The Slurm jobs of the newest starts of the runs."""
    found = (slurm_job_id(read_job(paths)) for paths in runs)
    return list(dict.fromkeys(job_id for job_id in found if job_id))


def ordered_runs(study: StudyPaths, planned: Iterable[str]) -> dict[str, float]:
    """Return the runs that an active launcher on this machine has still to start, and since when.

    A launcher that has a key counts a run as started once its job.json has that key: its time is
    then infinite, whatever the clocks said. Without a key the times are compared.
    """
    record = read_json(study.launcher)
    if not record or not is_alive(record):
        return {}
    wanted, since = record.get("run_ids", list(planned)), record.get("started")
    if not isinstance(wanted, list) or not isinstance(since, int | float):
        return {}
    names = {name for name in wanted if isinstance(name, str)}
    ordered = {run_id: seconds(since) for run_id in planned if run_id in names}
    if not isinstance(key := record.get("key"), str):
        return ordered
    of_job = {run_id: (read_json(study.run(run_id).job) or {}).get("order") for run_id in ordered}
    return {run_id: math.inf for run_id in ordered if of_job[run_id] != key}
