"""Submits the runs of a study to Slurm through submitit."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor
from submitit.helpers import DelayedSubmission

from jobkit.errors import UsageError
from jobkit.launch import slurm_cluster
from jobkit.launch.command import job_command, leave_spec
from jobkit.launch.site import Site, minutes
from jobkit.launch.slurm_options import Batch
from jobkit.launch.states import counted
from jobkit.launch.task import run_in_job, sweep_in_job
from jobkit.paths import StudyPaths, write_json, write_whole
from jobkit.permissions import next_folder, private_folder
from jobkit.spec.study import Plan

_LIMIT = re.compile(r"job submit limit|MaxSubmit", re.IGNORECASE)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Executor(SlurmExecutor):
    """Makes scripts, pickles and jobs as submitit does, and submits through our own call of sbatch.

    submitit calls sbatch in this process's environment, where an outer job's variables and
    SBATCH_* would count, and submits an array through a plain SlurmExecutor. Nothing public
    changes either, so this class implements `_internal_process_submissions`, the one method that
    submitit's Executor leaves to each kind of executor. The script's text is submitit's own.
    """

    def __init__(self, folder: Path, batch: Batch, taken: list[str]) -> None:
        super().__init__(folder)
        more = dict(batch.options)
        # All are additional parameters: with its own ones for nodes and tasks, submitit would wait
        # for a result from every task. Its defaults that do not fit are overridden or left out.
        self.update_parameters(
            job_name=more.pop("job-name"),
            additional_parameters=more,
            use_srun=False,
            wckey=None,
            array_parallelism=batch.at_once or 1000,
            stderr_to_stdout=True,
        )
        self._batch = batch
        self._taken = taken  # gets the id of each job as soon as Slurm has it

    @classmethod
    def affinity(cls) -> int:
        """Always available: a dry run makes scripts on machines without Slurm."""
        return 2

    def script(self, count: int) -> str:
        """The batch script of a number of calls, an array where there are several."""
        self.parameters.pop("map_count", None)
        if count > 1:
            self.parameters["map_count"] = count
        # exec: a signal to the batch shell alone is for the run too.
        return self._make_submission_file_text(f"exec {self._submitit_command_str}", "")

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        """Submit all calls with one sbatch; a job waits a minute for its pickle."""
        count = len(delayed_submissions)
        text = self.script(count)
        job_id = slurm_cluster.sbatch(text, self._batch.options)
        self._taken.append(job_id)
        ids = [f"{job_id}_{index}" for index in range(count)] if count > 1 else [job_id]
        jobs: list[Job[Any]] = [
            self.job_class(folder=self.folder, job_id=i, tasks=[0]) for i in ids
        ]
        jobs[0].paths.submission_file.write_text(text)
        for job, delayed in zip(jobs, delayed_submissions, strict=True):
            delayed.dump(job.paths.submitted_pickle)
        return jobs


def script(batch: Batch, folder: Path) -> str:
    """The batch script of an array, byte for byte as it is submitted."""
    return Executor(folder, batch, []).script(1 if batch.whole else len(batch.run_ids))


def check(study: StudyPaths, batches: Sequence[Batch]) -> None:
    """Ask Slurm whether it would accept each script. Raises UsageError with its reason."""
    for batch in batches:
        text = script(batch, next_folder(study.submitit))
        try:
            slurm_cluster.sbatch(text, batch.options, test=True)
        except UsageError as error:
            if not _LIMIT.search(str(error)):  # submit finds how many runs there is room for
                raise


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Between sbatch and the record of the job's id a signal would leave unknown jobs behind."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


@_signals_wait()
def submit(
    plan: Plan, batches: Sequence[Batch], site: Site, max_restarts: int | None = None
) -> tuple[list[str], tuple[str, ...], str]:
    """Submit everything; return the ids of the arrays, the runs that are left, and why.

    One sbatch per array; one for which the limit of submitted jobs leaves too little room is cut,
    and what was taken stays. Any other failure cancels what was submitted, and is a UsageError.
    """
    jobs: list[str] = []
    waiting = list(batches)
    folder = private_folder(next_folder(private_folder(plan.paths.submitit)))
    while waiting:
        batch = waiting.pop(0)
        try:
            _submit(plan, batch, site.shell(), max_restarts, Executor(folder, batch, jobs))
        except (UsageError, OSError) as error:  # a full disk too
            limit, half = _LIMIT.search(str(error)), len(batch.run_ids) // 2
            if limit and half and not batch.whole:  # there may be room for a part of it
                parts = (batch.run_ids[:half], batch.run_ids[half:])
                waiting[:0] = [replace(batch, run_ids=part) for part in parts]
            elif limit:
                left = tuple(r for b in (batch, *waiting) for r in b.run_ids)
                return jobs, left, f"not submitted: {counted(len(left), 'run')}: {error}"
            elif jobs:
                slurm_cluster.cancel(jobs)
                raise UsageError(f"{error}; jobs {', '.join(jobs)} were cancelled") from None
            else:
                raise
    return jobs, (), ""


def _submit(
    plan: Plan, batch: Batch, site: str, max_restarts: int | None, executor: Executor
) -> None:
    """Submit one array, and note each run's job in its folder."""
    calls, records = [], []
    runs = [plan.paths.run(run_id) for run_id in batch.run_ids]
    for run_id, paths in zip(batch.run_ids, runs, strict=True):
        spec = plan.runs[run_id]
        paths.folder.mkdir(exist_ok=True)
        write_whole(paths.site, site)  # which the job reads as it starts
        leave_spec(paths, spec)
        line = job_command(spec, paths, batch.whole, max_restarts)
        calls.append((str(paths.folder), line))
        first = max(paths.attempt_numbers(), default=-1) + 1
        records.append({"first_attempt": first, "shared": batch.whole, "command": line})
    if batch.whole:
        limit_s = minutes(str(batch.options["time"])) * 60 / len(calls)
        jobs = [executor.submit(sweep_in_job, calls, limit_s)] * len(calls)
    else:
        with executor.batch():
            jobs = [executor.submit(run_in_job, *call) for call in calls]
    for paths, job, record in zip(runs, jobs, records, strict=True):
        ids = {"v": 1, "launcher": "slurm", "job_id": job.job_id, "submitted": time.time()}
        write_json(paths.submission, {**ids, **record})
        write_whole(paths.script, job.paths.submission_file.read_text())
        paths.scheduler_log.unlink(missing_ok=True)
        paths.scheduler_log.symlink_to(os.path.relpath(job.paths.stdout, paths.folder))
