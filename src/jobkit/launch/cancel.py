"""`python -m jobkit cancel`: ends the runs of a study, or one job of run.sh alone.

Ids of jobs and processes come from files that somebody else may have written. A job is ended where
Slurm says that it is this user's, and of the study's name or on the cluster that run.sh noted; a
process where its start and its words are those of the launcher or of run.sh.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.launch import local, slurm_cluster
from jobkit.launch.slurm_options import job_names
from jobkit.launch.states import States, wait_for_end
from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import UNDER_WAY, job_ids
from jobkit.paths import RunPaths, StudyPaths, logs_root, read_json
from jobkit.processes import end_process, is_alive, is_at_work
from jobkit.spec.study import Plan, find_study, is_of_logs, is_run, read_plan


@command
def main(argv: Sequence[str] | None = None) -> int:
    """End a study's runs, or a single job; 0 also where none was running or pending."""
    options = Parser(
        prog="jobkit cancel",
        description="End the running and pending runs of a study, or one job of run.sh alone.",
        epilog="examples:\n  python -m jobkit cancel demo\n"
        "  python -m jobkit cancel job-17      the job whose folder is logs/single/job-17",
    )
    options.add_argument(
        "study", nargs="?", help="its name or folder, or that of a job (default: the newest study)"
    )
    source = options.parse_args(argv).study
    if (folder := single_run(source)) is not None:
        print(cancel_single(folder))
        return Exit.OK
    paths = StudyPaths(find_study(source, planned=True))
    ended = not is_of_logs(paths.folder) and cancel_study(paths)
    name = paths.folder.name
    print(f"{name}: " + ("its runs were ended" if ended else "no run was running or pending"))
    if ended:
        print(f"to continue, run it again; the state of each run: python -m jobkit status {name}")
    return Exit.OK


def _check_owner(folder: Path) -> None:
    """Raise UsageError for a folder of another user."""
    if (owner := folder.stat().st_uid) != os.geteuid():
        raise UsageError(f"{folder} belongs to user id {owner}: only its owner ends its runs")


def cancel_study(paths: StudyPaths) -> bool:
    """End a study's runs, on this machine and on Slurm; return whether there were any.

    Raises UsageError, before anything is ended, if its files name what is not the study's.
    """
    _check_owner(paths.folder)
    plan = read_plan(paths.folder)
    if not paths.plan.exists():
        raise UsageError(_name_one(paths.folder, plan))
    ended = local.cancel(paths)
    jobs = job_ids(map(plan.paths.run, plan.runs))
    if jobs and States(plan).under_way():
        collector = (read_json(paths.collect_job) or {}).get("job_id")
        wanted = [*jobs, *([str(collector)] if collector else [])]
        slurm_cluster.cancel(slurm_cluster.own_jobs(plan.study.name, wanted, job_names(plan)))
        if not wait_for_end(plan):
            raise UsageError("the jobs have not ended yet: check again with status")
        ended = True
    return ended


def _name_one(folder: Path, plan: Plan) -> str:
    """Which of the jobs of run.sh alone are to be named: they are no study's."""
    runs = [r for r, state in States(plan).look().items() if state.status in UNDER_WAY]
    if not runs:
        return f"{folder} has single jobs: none is running or pending"
    in_logs = folder.absolute() == (logs_root() / "single").absolute()
    how = f"python -m jobkit cancel {runs[-1] if in_logs else folder / runs[-1]}"
    listed = ", ".join(runs[-5:])
    return f"{folder} has single jobs: name the one to end, as: {how} (under way: {listed})"


# --- one job of run.sh alone ------------------------------------------------------------------


def single_run(name: str | None) -> Path | None:
    """The folder of a job of run.sh, by its path or bare name; None where it is not one."""
    if not name:
        return None
    try:
        named = logs_root() / "single" / name
        folder = named if "/" not in name and is_run(named) else Path(name)
        is_single = folder.is_dir() and is_run(folder) and folder.absolute().parent.name == "single"
    except (OSError, ValueError):  # a name that no file can have; the caller says so of a study
        return None
    return folder if is_single else None


def cancel_single(folder: Path) -> str:
    """End the newest start of a run; return what was done. Raises UsageError if that is not known.

    run.sh notes in job.json who runs the newest start, which may have resumed the run.
    """
    _check_owner(folder)
    noted, name = read_json(RunPaths(folder).job) or {}, folder.absolute().name
    job_id, pid, cluster = noted.get("job_id"), noted.get("pid"), noted.get("cluster")
    if noted.get("launcher") == "run.sh" and isinstance(job_id, str):
        if noted.get("shared") is True and name != f"job-{job_id}":
            raise UsageError(
                f"{name} was resumed inside Slurm job {job_id}, which may do other work "
                f"too: nothing was cancelled; to end all of it: scancel {job_id}"
            )
        if not cluster or cluster != slurm_jobs.cluster():  # which has other jobs of this number
            raise UsageError(
                f"Slurm job {job_id} is of cluster {cluster or 'unknown'}, and not known to be of "
                f"this one: nothing was cancelled; if it is: scancel {job_id}"
            )
        if not slurm_cluster.own_jobs(name, [job_id]):
            return f"job {job_id}: Slurm has no such job that is running or pending"
        slurm_cluster.cancel([job_id])
        return f"job {job_id}: Slurm was asked to end it"
    if noted.get("launcher") == "run.sh" and type(pid) is int and pid > 0:
        alive, child = is_alive(noted), noted.get("child")
        if alive is None:
            where = f"{noted.get('host')}, as process {pid}"
            raise UsageError(f"{name} was started on {where}: end it there")
        if alive is False and isinstance(child, Mapping) and is_at_work(noted):
            raise UsageError(
                f"{name}: its run.sh was killed, and its ranks go on under process "
                f"{child.get('pid')} on this machine: end them with: kill {child.get('pid')}"
            )
        return _end_run_sh(pid, noted.get("pid_start"))
    raise UsageError(
        f"{name}: its folder does not say whose it is; end its job with scancel, "
        "or with Ctrl-C where it was started"
    )


def _end_run_sh(pid: int, began: object) -> str:
    """End run.sh, which hands it on to its ranks, and wait for its end.

    began: when the process that is meant began, in ticks since the boot.
    """

    def is_that(start: int, words: list[bytes]) -> bool:
        return start == began and any(w == b"run.sh" or w.endswith(b"/run.sh") for w in words)

    try:
        ended = end_process(pid, is_that)
    except OSError as error:
        raise UsageError(
            f"process {pid} cannot be signalled safely ({error.strerror}): end it with Ctrl-C "
            "where it was started"
        ) from None
    return f"process {pid}: " + ("it was ended" if ended else "it is not running on this machine")
