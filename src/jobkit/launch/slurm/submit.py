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
from jobkit.files import read_text
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
_AWAY = re.compile(r"Unable to contact|Connection refused")
_NO_ANSWER = re.compile(r"Socket timed out|did not answer '")


class CollectRefused(Exception):
    """The training jobs are submitted, and the collect job was rejected."""


class LimitReached(Exception):
    """Some arrays are submitted, and no more: as many as may wait do, or Slurm does not answer.

    Slurm gives the first reason also for a job that is too large, which no other try would mend.
    """

    def __init__(self, masters: list[str], left: tuple[str, ...], reason: object) -> None:
        super().__init__(f"{len(left)} runs were not submitted: {reason}")
        self.masters, self.left = masters, left


def cancel_stamp(study: StudyPaths) -> str:
    """What `jobkit cancel` left in the study's folder, another text at each call; "" if nothing."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(study.cancelled)
    return ""


def at_limit(error: Exception) -> bool:
    """Whether Slurm refused because no more jobs may be submitted now (or for a job's size)."""
    return _LIMIT.search(str(error)) is not None


def no_answer(error: object) -> bool:
    """Whether Slurm's controller gave no answer in time: a job may exist all the same."""
    return _NO_ANSWER.search(str(error)) is not None


def may_pass(error: UsageError) -> bool:
    """Whether a later try may succeed: the limit was reached, or the controller not."""
    return at_limit(error) or no_answer(error) or _AWAY.search(str(error)) is not None


def script(batch: Batch, folder: Path, at_once: int | None, whole: bool = False) -> str:
    """The batch script of an array, byte for byte as it is submitted."""
    return _executor(folder, batch.options, at_once).script(1 if whole else len(batch.run_ids))


def check(submission: Submission, full: bool = False) -> None:
    """Ask Slurm whether it would accept each script. Raises UsageError with its reason.

    full: jobs of the study may have all places, so that a refusal for want of one says nothing.
    """
    for batch in submission.batches:
        try:
            _check(submission, batch)
        except UsageError as error:
            if not at_limit(error):
                raise
            try:  # one run: how many of an array are taken at one time, submit finds
                _check(submission, replace(batch, run_ids=batch.run_ids[:1]))
            except UsageError as of_one:
                if not (full and at_limit(of_one)):
                    raise


def _check(submission: Submission, batch: Batch) -> None:
    folder = next_folder(submission.study.submitit)
    text = script(batch, folder, submission.at_once, submission.whole)
    commands.check(text, batch.options)


@contextlib.contextmanager
def _new_folder(study: StudyPaths) -> Iterator[Path]:
    """A new folder for submitit's files; it is removed again where Slurm took nothing."""
    folder = own_folder(next_folder(own_folder(study.submitit)))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()


def submit(submission: Submission, full: bool = False) -> list[str]:
    """Submit everything; return the ids of the arrays (or of the one job).

    One sbatch per array; an array that is larger than the number of jobs that may be submitted is
    cut. Raises LimitReached where the cluster takes no more jobs after the first array (full: or
    not even that), or does not answer after it, or where the study is cancelled meanwhile, and
    UsageError for any other refusal: then what was submitted is cancelled.
    """
    with _new_folder(submission.study) as folder:
        return _submit_all(submission, full, folder)


def _submit_all(submission: Submission, full: bool, folder: Path) -> list[str]:
    masters: list[str] = []
    waiting, prepared = list(submission.batches), set[str]()
    stamp = cancel_stamp(submission.study)
    while waiting:
        if cancel_stamp(submission.study) != stamp:  # `jobkit cancel` waits, and ends the others
            left = tuple(r for b in waiting for r in b.run_ids)
            raise LimitReached(masters, left + submission.later, "the study was cancelled")
        batch = waiting.pop(0)
        _prepare(submission, [r for r in batch.run_ids if r not in prepared])
        prepared |= {*batch.run_ids}
        try:
            masters += _submit(submission, batch, folder)
        except UsageError as error:
            limit = at_limit(error)
            if limit and (half := len(batch.run_ids) // 2) and not submission.whole:
                parts = (batch.run_ids[:half], batch.run_ids[half:])
                waiting[:0] = [replace(batch, run_ids=part) for part in parts]
            elif (limit and full) or (masters and may_pass(error)):
                left = tuple(r for b in (batch, *waiting) for r in b.run_ids)
                raise LimitReached(masters, left + submission.later, error) from None
            elif masters:
                commands.cancel(masters)
                raise UsageError(f"{error}; jobs {', '.join(masters)} were cancelled") from None
            else:
                raise
    return masters


def _prepare(submission: Submission, run_ids: Sequence[str]) -> None:
    """Write what the job of each run reads as it starts."""
    text = submission.site.shell()
    for run_id in run_ids:
        paths, kept = submission.study.run(run_id), ""
        paths.folder.mkdir(exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            kept = read_text(paths.site)
        if text != kept:  # a try may be one of many: each write waits for the disk
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
