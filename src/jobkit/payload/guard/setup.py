"""Gives a job's training its guard, and resumes it from a checkpoint if there is one."""

import inspect
from pathlib import Path

from jobkit.errors import Exit, UsageError
from jobkit.payload import distributed, host, readback
from jobkit.payload.checkpoints import copies, manager, state, store
from jobkit.payload.checkpoints.manager import CheckpointManager
from jobkit.payload.checkpoints.resume import mark_fresh_start, named_by_user, of_own_run, resume
from jobkit.payload.checkpoints.store import Store, clear_unfinished
from jobkit.payload.distributed import Group, all_or_raise
from jobkit.payload.guard import consensus, faults
from jobkit.payload.guard.consensus import Consensus, JobGuard, Pace
from jobkit.payload.guard.watchdog import Watchdog
from jobkit.payload.job import RankJob
from jobkit.payload.report import Reporter, write_outcome
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import Every

# Where a rank waits for others or for a disk.
_WAITING = (consensus, distributed, copies, manager, state, store, readback)
WAITS_IN = [inspect.getfile(module) for module in _WAITING]


def guarded(job: RankJob, trainer: Trainer) -> JobGuard:
    """Make the guard, and resume from the newest valid checkpoint. Every rank calls.

    Raises UsageError, on every rank, for a checkpoint of a different configuration.
    """
    spec, group, rank = trainer.spec, trainer.group, job.place.rank
    made = JobGuard(
        consensus=Consensus(group.on_cpu(), Pace(group.device)),
        stop=job.stop,
        watchdog=Watchdog(
            rank,
            spec.timeout_s,
            job.stop,
            trainer.report.stream,
            lambda why: _record_hang(job, trainer.report, why),
            waits_in=WAITS_IN,
        ),
        checkpoints=_checkpoints(job, trainer, group) if job.paths else None,
        fault=faults.planned(job.attempt, rank, job.paths),
    )
    trainer.guard = made
    return made


def _checkpoints(job: RankJob, trainer: Trainer, group: Group) -> CheckpointManager:
    """The manager of the run's checkpoints; the newest valid one is loaded first."""
    spec, paths = trainer.spec, job.paths
    assert paths
    store = Store(job.place.rank, group.on_cpu(), spec.checkpoint_checksums)
    if store.rank == 0:
        clear_unfinished(paths)
    background = spec.checkpoint_async
    made = CheckpointManager(
        store,
        paths,
        job.attempt,
        trainer.report,
        Every.of(spec.checkpoint_every),
        keep=spec.checkpoint_keep,
        background=group.device.type == "cuda" if background is None else background,
        device=group.device,
    )
    loaded = resume(trainer, store, _shared(job, store), must=job.resume_from is not None)
    if loaded and loaded.parent == paths.checkpoints:
        made.newest = trainer.progress.iteration
    return made


def _shared(job: RankJob, store: Store) -> list[Path]:
    """The checkpoints that rank 0 finds: a file system may not show all ranks the same."""

    def find() -> list[Path]:
        return _candidates(job) if store.rank == 0 else []

    return all_or_raise(store.everyone, find, UsageError)[0]


def _candidates(job: RankJob) -> list[Path]:
    """The checkpoints that the job may resume from, the newest first.

    --fresh and --resume-from are for the first start of a job: when it is started again, with the
    same options, what it has done since counts.
    """
    assert job.paths
    own = of_own_run(job.paths, job.attempt)
    chosen = job.fresh or job.resume_from is not None
    if not chosen or (job.restarted and own):
        return own
    found = named_by_user(job.resume_from) if job.resume_from else []
    mark_fresh_start(job.paths, job.attempt)
    return found


def _record_hang(job: RankJob, report: Reporter, reason: str) -> None:
    """Record why a rank that makes no progress is ended."""
    reason = write_outcome(job.paths, job.attempt, "failed", Exit.FAILED, reason)
    report.record("run_end", status="failed", reason=reason, total_time_s=host.process_age_s())
