"""Submits the runs of a study to Slurm through submitit."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from submitit import Job

from jobkit.errors import UsageError
from jobkit.launch.command import job_command, leave_spec
from jobkit.launch.slurm import commands
from jobkit.launch.slurm.executor import Executor
from jobkit.launch.slurm.options import (
    Batch,
    Options,
    Submission,
    output_file,
    submitit_parameters,
)
from jobkit.launch.task import collect_in_job, run_in_job, sweep_in_job
from jobkit.paths import REPOSITORY, RunPaths, StudyPaths, write_json, write_whole
from jobkit.permissions import next_folder, own_folder

# Options of the training jobs that the collecting job does not take over.
_TRAINING_ONLY = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres"}
_TRAINING_ONLY |= {"gpus-per-task", "time", "exclusive", "nodelist", "exclude", "begin"}

_LIMIT = re.compile(r"job submit limit|MaxSubmit", re.IGNORECASE)


class CollectRefused(Exception):
    """The training jobs are submitted, and the collect job was rejected."""


def script(batch: Batch, folder: Path, at_once: int | None, whole: bool = False) -> str:
    """The batch script of an array, byte for byte as it is submitted."""
    return _executor(folder, batch.options, at_once).script(1 if whole else len(batch.run_ids))


def check(submission: Submission) -> None:
    """Ask Slurm whether it would accept each script. Raises UsageError with its reason."""
    for batch in submission.batches:
        folder = next_folder(submission.study.submitit)
        text = script(batch, folder, submission.at_once, submission.whole)
        try:
            commands.check(text, batch.options)
        except UsageError as error:
            if not _LIMIT.search(str(error)):  # submit finds how many runs there is room for
                raise


@contextlib.contextmanager
def _new_folder(study: StudyPaths) -> Iterator[Path]:
    """A new folder for submitit's files; it is removed again where Slurm took nothing."""
    folder = own_folder(next_folder(own_folder(study.submitit)))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()


def submit(submission: Submission) -> tuple[list[str], tuple[str, ...], str]:
    """Submit everything; return the ids of the arrays, the runs that are left, and why.

    One sbatch per array; an array for which the limit of submitted jobs leaves too little room is
    cut, and what was taken stays. Any other refusal is a UsageError, after what was submitted is
    cancelled.
    """
    masters: list[str] = []
    waiting = list(submission.batches)
    with _new_folder(submission.study) as folder:
        while waiting:
            batch = waiting.pop(0)
            _prepare(submission, batch.run_ids)
            try:
                masters += _submit(submission, batch, folder)
            except UsageError as error:
                limit, half = _LIMIT.search(str(error)), len(batch.run_ids) // 2
                if limit and half and not submission.whole:  # there may be room for a part of it
                    parts = (batch.run_ids[:half], batch.run_ids[half:])
                    waiting[:0] = [replace(batch, run_ids=part) for part in parts]
                elif limit and masters:
                    left = tuple(r for b in (batch, *waiting) for r in b.run_ids)
                    return masters, left, f"{len(left)} runs were not submitted: {error}"
                elif masters:
                    commands.cancel(masters)
                    raise UsageError(f"{error}; jobs {', '.join(masters)} were cancelled") from None
                else:
                    raise
    return masters, (), ""


def _prepare(submission: Submission, run_ids: Sequence[str]) -> None:
    """Write what the job of each run reads as it starts."""
    text = submission.site.shell()
    for run_id in run_ids:
        paths = submission.study.run(run_id)
        paths.folder.mkdir(exist_ok=True)
        write_whole(paths.site, text)
        leave_spec(submission.study, run_id, submission.plan.runs[run_id])


def _submit(submission: Submission, batch: Batch, folder: Path) -> list[str]:
    study = submission.study
    firsts = {run_id: _next_attempt(study.run(run_id)) for run_id in batch.run_ids}
    executor = _executor(folder, batch.options, submission.at_once)
    lines = {run_id: _command(submission, run_id) for run_id in batch.run_ids}
    folders = {run_id: str(study.run(run_id).folder) for run_id in batch.run_ids}
    if submission.whole:
        parts = [(folders[r], lines[r]) for r in batch.run_ids]
        job = executor.submit(sweep_in_job, parts, submission.max_restarts)
        jobs: dict[str, Job[int]] = dict.fromkeys(batch.run_ids, job)
    else:
        with executor.batch():
            made = [executor.submit(run_in_job, folders[r], lines[r]) for r in batch.run_ids]
        jobs = dict(zip(batch.run_ids, made, strict=True))
    for run_id, job in jobs.items():
        record = {"first_attempt": firsts[run_id], "shared": submission.whole}
        _note(study.run(run_id), job, {**record, "command": lines[run_id]})
    return list(dict.fromkeys(job.job_id.split("_")[0] for job in jobs.values()))


def _command(submission: Submission, run_id: str) -> list[str]:
    spec = submission.plan.runs[run_id]
    return job_command(
        spec, submission.study.run(run_id), submission.whole, submission.max_restarts
    )


def _executor(folder: Path, options: Options, at_once: int | None) -> Executor:
    parameters = submitit_parameters(options, at_once)
    return Executor(folder, parameters, lambda text: commands.sbatch(text, options))


def _next_attempt(paths: RunPaths) -> int:
    attempts = paths.attempt_numbers()
    return attempts[-1] + 1 if attempts else 0


def _note(paths: RunPaths, job: "Job[int]", more: Mapping[str, object]) -> None:
    """Write into the run's folder: its job, the script, and a link to the job's output."""
    submitted = {"v": 1, "launcher": "slurm", "job_id": job.job_id, "submitted": time.time()}
    write_json(paths.submission, {**submitted, **more})
    write_whole(paths.script, job.paths.submission_file.read_text())
    paths.scheduler_log.unlink(missing_ok=True)
    paths.scheduler_log.symlink_to(os.path.relpath(job.paths.stdout, paths.folder))


def submit_collect(submission: Submission, masters: Sequence[str]) -> str:
    """Submit the job that collects and plots after these others, if any; return its id.

    Raises CollectRefused where Slurm does not take it.
    """
    study, options = submission.study, submission.batches[0].options
    more: Options = {
        **{k: v for k, v in options.items() if k not in _TRAINING_ONLY},
        "job-name": f"{study.folder.name}-collect",
        "nodes": "1",
        "ntasks": "1",
        "time": "00:15:00",
        "output": output_file(study.collect_log),
    }
    if masters:
        more |= {"dependency": "afterany:" + ":".join(masters), "kill-on-invalid-dep": "yes"}
    words = ["bash", str(REPOSITORY / "plot_results.sh"), str(study.folder)]
    try:
        with _new_folder(study) as folder:
            job = _executor(folder, more, None).submit(collect_in_job, words)
    except UsageError as error:
        raise CollectRefused(str(error)) from None
    write_json(study.collect_job, {"job_id": str(job.job_id)})
    return str(job.job_id)
