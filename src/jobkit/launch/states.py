"""What became of the runs of a plan by now: from their files and, where there are jobs, Slurm."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jobkit.outcome import slurm_jobs
from jobkit.outcome.status import RunState, is_alive, run_state
from jobkit.paths import RunPaths, read_job, read_json
from jobkit.spec.plan import Plan

FINAL = ("ok", "failed", "oom", "timeout", "preempted", "cancelled", "node_fail")
UNDER_WAY = ("running", "pending")
SQUEUE_EVERY_S, SACCT_EVERY_S = 5.0, 30.0  # both are shared by all users of a cluster


class States:
    """Looks again and again. Runs that have ended are not asked again, Slurm not too often."""

    def __init__(self, plan: Plan, ask: bool = True) -> None:
        """ask: Slurm may be asked."""
        self.plan = plan
        self.found: dict[str, RunState] = {}
        self._may_ask = ask
        self._next = {"squeue": 0.0, "sacct": 0.0}  # when each may be asked again
        self.jobs: dict[str, slurm_jobs.Job] = {}  # by run: what Slurm last said of its job
        self._answers: dict[str, slurm_jobs.Job] = {}

    def look(self, fresh: bool = False) -> dict[str, RunState]:
        """What became of each planned run by now. fresh: ask Slurm, however lately it was asked."""
        if fresh:
            self._next = dict.fromkeys(self._next, 0.0)
        paths = self.plan.paths
        record = read_json(paths.launcher)
        order = record if record and is_alive(record) else {}
        open_runs = [r for r in self.plan.runs if not self._ended(r)]
        own = {r: _own_state(paths.run(r), order, r) for r in open_runs}
        records = {r: job for r in open_runs if (job := _slurm_record(self.plan, r))}
        self._ask([str(job["job_id"]) for r, job in records.items() if own[r].status != "ok"])
        for run_id in open_runs:
            self.found[run_id] = self._merged(run_id, own[run_id], records.get(run_id))
        return {run_id: self.found[run_id] for run_id in self.plan.runs}

    def _ended(self, run_id: str) -> bool:
        return run_id in self.found and self.found[run_id].status in FINAL

    def _ask(self, ids: list[str]) -> None:
        now = time.monotonic()
        if not ids or not self._may_ask or now < self._next["squeue"]:
            return
        accounting = now >= self._next["sacct"]
        self._answers |= slurm_jobs.ask(ids, accounting)
        self._next["squeue"] = now + SQUEUE_EVERY_S
        if accounting:
            self._next["sacct"] = now + SACCT_EVERY_S

    def _merged(self, run_id: str, own: RunState, record: Mapping[str, object] | None) -> RunState:
        job = self._answers.get(str(record["job_id"])) if record else None
        if job:
            self.jobs[run_id] = job
        shared = bool(record and record.get("shared"))
        return slurm_jobs.merged(own, job, shared)


def _own_state(paths: RunPaths, order: Mapping[str, Any], run_id: str) -> RunState:
    """A run's state by its files; one that the launcher at work is yet to start again is pending,
    whatever became of it before.
    """
    ordered = run_id in order.get("run_ids", ())
    state = run_state(paths, launcher_alive=ordered)
    if ordered and ((read_job(paths) or {}).get("started") or 0.0) < order["started"]:
        return replace(state, status="pending", reason="waits for its turn", evidence="")
    return state


def _slurm_record(plan: Plan, run_id: str) -> Mapping[str, object] | None:
    job = read_job(plan.paths.run(run_id))
    return job if job and job.get("launcher") == "slurm" and job.get("job_id") else None


def states(plan: Plan) -> dict[str, RunState]:
    """What became of each planned run, in one look."""
    return States(plan).look()


def job_ids(plan: Plan) -> list[str]:
    """The Slurm jobs of the plan's runs."""
    records = (_slurm_record(plan, run_id) for run_id in plan.runs)
    return list(dict.fromkeys(str(job["job_id"]) for job in records if job))


def select(found: Mapping[str, RunState], only: str | None = None) -> list[str]:
    """The runs to start: those missing or not ok, or only those with one status."""
    if only:
        return [r for r, state in found.items() if state.status == only]
    return [r for r, state in found.items() if state.status not in ("ok", *UNDER_WAY)]
