"""Submits runs to Slurm through submitit. The only place that calls sbatch and scancel."""

import contextlib
import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from submitit import Job
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from jobkit.errors import UsageError
from jobkit.launch.command import clean_environment, job_command, python_path
from jobkit.launch.slurm.options import Batch, Options, Submission, submitit_parameters
from jobkit.launch.slurm.own import check_id
from jobkit.launch.task import collect_in_job, run_in_job, sweep_in_job
from jobkit.paths import REPOSITORY, RunPaths, own_folder, write_json, write_whole

TIMEOUT_S = 30.0  # for one call of a Slurm command


# What the job that collects does not share with those that train.
_OF_A_RUN = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres"}
_OF_A_RUN |= {"gpus-per-task", "time", "exclusive", "nodelist", "exclude", "begin"}


class CollectRefused(Exception):
    """The jobs are submitted, and the one that collects was refused."""


def script(batch: Batch, folder: Path, at_once: int | None, whole: bool = False) -> str:
    """The batch script of an array, byte for byte as submitit submits it."""
    count = len(batch.run_ids)
    parameters = submitit_parameters(batch.options, at_once)
    if count > 1 and not whole:
        parameters["map_count"] = count
    command = (
        f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    )
    return _make_sbatch_string(command=command, folder=folder, **parameters)


def check(submission: Submission) -> None:
    """Ask Slurm whether it would take each script. Raises UsageError with what it says."""
    for batch in submission.batches:
        text = script(batch, submission.study.submitit, submission.at_once, submission.whole)
        done = command(["sbatch", "--test-only"], text)
        if done.returncode:
            raise UsageError(refusal(done.stderr, batch.options))


def refusal(stderr: str, options: Options) -> str:
    """sbatch's refusal in one line, with the valid names where it is about a name."""
    lines = [line for line in stderr.splitlines() if "error" in line or "failure" in line]
    said = (lines or stderr.strip().splitlines() or ["sbatch refused"])[-1 if lines else 0]
    if re.search(r"Socket timed out|Unable to contact|Connection refused", said):
        return f"Slurm's controller does not answer ({said}): try again later"
    said = said.removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
    hint = ""
    if "account" in said.lower():
        user = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}"]
        hint = _names([*user, "format=account"], "accounts")
    elif "partition" in said.lower():
        hint = _names(["sinfo", "-h", "-o", "%R"], "partitions")
    elif "qos" in said.lower():
        hint = _names(["sacctmgr", "-n", "-P", "show", "qos", "format=name"], "QOS")
    asked = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items())
    return f"Slurm would not take it: {said}{hint} (asked for: {asked})"


def _names(words: list[str], what: str) -> str:
    """ "; known partitions: a, b", from the lines that a command prints; empty without any."""
    try:
        done = command(words)
    except UsageError:
        return ""
    names = sorted({name for line in done.stdout.split() for name in line.split(",") if name})
    return f"; known {what}: {', '.join(names)}" if names else ""


def command(words: list[str], stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Call a Slurm command, within a bound of time. Raises UsageError where that cannot be."""
    try:
        return subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=slurm_environment(),
        )
    except FileNotFoundError:
        raise UsageError(
            f"no '{words[0]}' on PATH: this machine has no Slurm; use --site local"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Slurm did not answer '{words[0]}' within {TIMEOUT_S:.0f} s: try again later"
        ) from None


def slurm_environment() -> dict[str, str]:
    """The environment for Slurm's commands, without what another job or SBATCH_* left in it."""
    kept = {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS")}
    return {
        **clean_environment(os.environ),
        **kept,
        "PYTHONPATH": python_path(),
        "PYTHONSAFEPATH": "1",
    }


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have submitit's own call of sbatch see this environment."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(values)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit(submission: Submission) -> list[str]:
    """Submit everything; return the ids of the arrays (or of the one job). One sbatch a shape."""
    study = submission.study
    own_folder(study.submitit)
    for batch in submission.batches:
        for run_id in batch.run_ids:
            paths = study.run(run_id)
            paths.folder.mkdir(exist_ok=True)
            write_whole(paths.site, submission.site.shell())
    masters: list[str] = []
    for batch in submission.batches:
        try:
            with _environment(slurm_environment()):
                masters += _submit(submission, batch)
        except FailedJobError as error:
            if masters:
                cancel(masters)
            undone = f"; jobs {', '.join(masters)} were cancelled" if masters else ""
            raise UsageError(refusal(str(error), batch.options) + undone) from None
    return masters


def _submit(submission: Submission, batch: Batch) -> list[str]:
    study = submission.study
    firsts = {run_id: _next_attempt(study.run(run_id)) for run_id in batch.run_ids}
    executor = _executor(submission, batch.options)
    commands = {run_id: _command(submission, run_id) for run_id in batch.run_ids}
    folders = {run_id: str(study.run(run_id).folder) for run_id in batch.run_ids}
    if submission.whole:
        parts = [(folders[r], commands[r]) for r in batch.run_ids]
        job = executor.submit(sweep_in_job, parts, submission.max_restarts)
        jobs: dict[str, Job[int]] = dict.fromkeys(batch.run_ids, job)
    else:
        with executor.batch():
            made = [executor.submit(run_in_job, folders[r], commands[r]) for r in batch.run_ids]
        jobs = dict(zip(batch.run_ids, made, strict=True))
    for run_id, job in jobs.items():
        record = {"first_attempt": firsts[run_id], "shared": submission.whole}
        _note(study.run(run_id), job, {**record, "command": commands[run_id]})
    return list(dict.fromkeys(job.job_id.split("_")[0] for job in jobs.values()))


def _command(submission: Submission, run_id: str) -> list[str]:
    spec = submission.plan.runs[run_id]
    return job_command(
        spec, submission.study.run(run_id), submission.whole, submission.max_restarts
    )


def _executor(submission: Submission, options: Options) -> SlurmExecutor:
    executor = SlurmExecutor(folder=submission.study.submitit)
    executor.update_parameters(**submitit_parameters(options, submission.at_once))
    return executor


def _next_attempt(paths: RunPaths) -> int:
    attempts = paths.attempt_numbers()
    return attempts[-1] + 1 if attempts else 0


def _note(paths: RunPaths, job: "Job[int]", more: Mapping[str, object]) -> None:
    """Leave with the run: which job it is, the script, and a link to what Slurm says."""
    submitted = {"v": 1, "launcher": "slurm", "job_id": job.job_id, "submitted": time.time()}
    write_json(paths.submission, {**submitted, **more})
    shutil.copyfile(job.paths.submission_file, paths.script)
    paths.scheduler_log.unlink(missing_ok=True)
    paths.scheduler_log.symlink_to(os.path.relpath(job.paths.stdout, paths.folder))


def submit_collect(submission: Submission, masters: Sequence[str]) -> str:
    """Submit the job that collects and plots when all others have ended; return its id."""
    study, options = submission.study, submission.batches[0].options
    more: Options = {
        **{k: v for k, v in options.items() if k not in _OF_A_RUN},
        "job-name": f"{study.folder.name}-collect",
        "nodes": "1",
        "ntasks": "1",
        "time": "00:15:00",
        "dependency": "afterany:" + ":".join(masters),
        "kill-on-invalid-dep": "yes",
        "output": str(study.collect_log),
    }
    with _environment(slurm_environment()):
        executor = _executor(submission, more)
        words = ["bash", str(REPOSITORY / "plot_results.sh"), str(study.folder)]
        try:
            job = executor.submit(collect_in_job, words)
        except FailedJobError as error:
            raise CollectRefused(refusal(str(error), more)) from None
    write_json(study.collect_job, {"job_id": str(job.job_id)})
    return str(job.job_id)


def cancel(job_ids: Sequence[str]) -> None:
    """End the jobs, those that wait first, so that none starts in the meantime.

    Raises UsageError for what is no job id: a word of a file must not become scancel's option.
    """
    masters = [check_id(job_id) for job_id in dict.fromkeys(job_ids)]
    command(["scancel", "--state=PENDING", *masters])
    command(["scancel", *masters])
