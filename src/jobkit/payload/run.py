"""One rank's run: group, data, model, strategy, training, records."""

import faulthandler
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from jobkit.data.images import Dataset
from jobkit.errors import Exit, RanksDiffer, UsageError
from jobkit.paths import RunPaths
from jobkit.payload.batches import Batches, DeviceData
from jobkit.payload.checkpoint import Checkpoints
from jobkit.payload.data import load_data
from jobkit.payload.device import (
    configure,
    gpu_state,
    keep_freed_memory,
    process_age_s,
    recorded,
    resolved,
    seed_rank,
    set_environment,
    start_fields,
)
from jobkit.payload.distributed import Group, all_or_raise, banner, check_identity, join
from jobkit.payload.measure import measure_difference
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv, share_of_cores
from jobkit.payload.recipe import FastCNN, look_ahead
from jobkit.payload.report import Reporter, write_outcome, write_spec
from jobkit.payload.resume import named_by_user, of_own_run, resume
from jobkit.payload.same_ranks import compare_ranks
from jobkit.payload.signals import Stopped, StopRequest, read_fault
from jobkit.payload.stop import JobGuard
from jobkit.payload.strategies import strategy_class
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS, owners

MIN_CORES = 4  # for each GPU
_START_SHARE = 1.25  # of --timeout-s: a rank that has not joined the group by then ends


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What one rank of a run is started with."""

    spec: RunSpec  # its nodes and ranks are those of the place
    place: RankEnv
    paths: RunPaths | None  # None: nothing is written
    attempt: int = 0
    dry_run: bool = False
    stop: StopRequest = field(default_factory=StopRequest)
    resume_from: Path | None = None


def run_rank(job: RankJob) -> None:
    """Train as one rank, from the group to the last record.

    Raises UsageError for what the user gave, on every rank; any other error for a failed run.
    """
    import_s = process_age_s()
    report = Reporter(job.paths, job.attempt, job.place.rank)
    report.startup["import_s"] = import_s
    try:
        trainer = set_up(job, report)
        if job.dry_run:
            _try_forward(trainer)
        else:
            _train(job, trainer)
        trainer.group.close()
    except Exception as error:
        _record_failure(job, report, error)
        raise
    finally:
        report.close()


def set_up(job: RankJob, report: Reporter) -> Trainer:
    """Set up group, data and model, and report them."""
    spec, place = job.spec, job.place
    set_environment(spec)  # before the first call of CUDA
    threads = spec.threads or share_of_cores(place.local_world_size)
    torch.set_num_threads(threads)
    with report.stage("group_s"):
        interface = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME")
        report.log(f"joining {place.world_size} ranks over {interface or 'any interface'}")
        # NCCL looks for its peers without a limit of its own.
        limit_s = _START_SHARE * spec.timeout_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=report.stream)
        try:
            group = join(spec.device, place, spec.timeout_s, report.warn)
            check_identity(group, job.paths.folder.name if job.paths else "", job.attempt)
        finally:
            faulthandler.cancel_dump_traceback_later()
    spec = resolved(spec, group)
    configure(spec, group.device)
    if group.device.type == "cpu":
        keep_freed_memory()
    for line in banner(group, threads):
        report.say(line)
    with report.stage("data_s"):
        data = load_data(spec, group, report.say, job.dry_run)
    with report.stage("model_s"):
        trainer = build_trainer(spec, group, data, report)
    if job.paths:
        write_spec(job.paths, spec.to_dict(), place.rank)
    _record_start(trainer, threads)
    samples, normalised = trainer.batches.samples, trainer.strategy.normalised
    for text in warnings_of(job.spec, place, group.device.type, samples, normalised):
        report.warn(text)
    if spec.speed_run:
        report.info("validation is with test-time augmentation: --speed-run")
    return trainer


def build_trainer(
    spec: RunSpec,
    group: Group,
    data: Dataset,
    report: Reporter,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    """Model, strategy, optimizer and batches of this rank; dtype: of weights and images."""
    place, device, seed = group.place, group.device, spec.seed + spec.repeat
    strategy = strategy_class(spec.strategy)(spec, place, device)
    model = build_model(spec, len(data.classes))
    if isinstance(model, FastCNN):
        model.fit_whitening(data.train.images)
    strategy.setup(model.to(dtype))
    for line in strategy.describe():
        report.say(line)
    if spec.activation_checkpointing:
        report.say("activations: a block keeps its input, and is computed again going backward")
    trainer = Trainer(
        spec=spec,
        group=group,
        data=DeviceData(data, device, spec, dtype),
        batches=Batches(
            len(data.train.labels),
            spec.steps_batch_size,
            strategy.data_rank,
            strategy.data_world_size,
            spec.accumulate,
            seed,
        ),
        strategy=strategy,
        optimizer=strategy.make_optimizer(),
        report=report,
    )
    if spec.speed_run:
        look_ahead(trainer)
    seed_rank(seed, place.rank)
    return trainer


def warnings_of(
    spec: RunSpec, place: RankEnv, device: str, samples: int, normalised: bool
) -> Iterator[str]:
    """Yield lines on settings of other strategies, and on what spoils the run's numbers.

    device: its type. normalised: whether the model has batch normalisation.
    """
    unused = {
        "width": (":" in spec.model or spec.hidden is not None, "a built-in model, no --hidden"),
        "hidden": (spec.model != "mlp", "--model mlp"),
        "compile_mode": (not spec.compile, "--compile"),
        "lr_schedule": (spec.speed_run, "a training without --speed-run"),
    }
    for name in spec.differences():
        names = owners(name)
        of_others = bool(names) and spec.strategy not in names
        is_unused, need = unused.get(name, (of_others, f"strategy {' or '.join(names)}"))
        if is_unused:
            yield f"--{name.replace('_', '-')} has no effect: it needs {need}"
    if spec.steps_batch_size > samples:
        yield (
            f"the global batch of {spec.steps_batch_size} is more than the {samples} training "
            "samples: each epoch is one step of all of them"
        )
    cores, own = len(os.sched_getaffinity(0)), share_of_cores(place.local_world_size)
    if device == "cpu" and place.local_world_size > cores:
        yield (
            f"{place.local_world_size} ranks share {cores} cores: oversubscribed, timings are not "
            "meaningful"
        )
    if device == "cuda" and own < MIN_CORES:
        yield (
            f"{own} CPU core{'s' * (own > 1)} for each GPU: issuing its work, NCCL and "
            f"checkpoints need {MIN_CORES}; give --cpus-per-task=8"
        )
    # The one thing in a model that does depend on the number of ranks.
    part = FACTS[spec.strategy].normalises_over
    if normalised and spec.world_size > 1 and part:
        yield (
            f"the model has batch normalisation, which takes its statistics over each {part}: "
            "losses change with the number of ranks"
        )


def _record_start(trainer: Trainer, threads: int) -> None:
    """Write run_start: what ran where, with which versions."""
    spec, group, strategy = trainer.spec, trainer.group, trainer.strategy
    place, device = group.place, group.device
    batch = min(spec.steps_batch_size, trainer.batches.samples)
    state = gpu_state(device) if place.rank == 0 else {}  # nvidia-smi takes seconds
    fields = start_fields(group, threads)
    fields["versions"] |= state | recorded(device)
    trainer.report.record(
        "run_start",
        spec=spec.differences(),
        **fields,
        devices=strategy.devices if strategy.facts.whole_node else place.world_size,
        global_batch_size=batch,
        batch_size_per_rank=-(-batch // place.world_size),
        train_samples=trainer.batches.samples,
        test_samples=len(trainer.data.test.labels),
        parameters=strategy.parameter_count,
        shard_groups=strategy.shard_groups,
    )
    trainer.report.say(
        f"{spec.strategy} on {spec.dataset}: {strategy.parameter_count:,} parameters, "
        f"{trainer.batches.samples:,} training samples in batches of {batch}, {spec.precision}"
    )


def _try_forward(trainer: Trainer) -> None:
    """Dry run: one forward pass of one batch, nothing recorded."""
    indices = next(trainer.batches.epoch(0)).micro_batches[0]
    images, _ = trainer.data.training_batch(indices if len(indices) else torch.tensor([0]), 0)
    logits = trainer.strategy.predict(images)
    trainer.report.say(f"dry run: ready to train; logits {tuple(logits.shape)}, nothing recorded")


def _train(job: RankJob, trainer: Trainer) -> None:
    """Train; write the last record and the outcome once every rank is done."""
    spec, report = trainer.spec, trainer.report
    trainer.guard = guard = _guard(job, trainer)
    # PowerSGD keeps what it left out; a compiled graph is of one kind of pass only.
    fits = spec.ddp_comm_hook != "powersgd" and not spec.compile
    copies = trainer.strategy.facts.copies_model and job.place.world_size > 1
    if spec.why and copies and fits:
        trainer.after_step = [measure_difference]
    if spec.check_ranks and copies:
        trainer.after_step = [*trainer.after_step, compare_ranks]
    elif spec.check_ranks:
        report.info(
            "--check-ranks compares the copies of the model: there are none, under strategy "
            f"{spec.strategy} at {job.place.world_size} ranks"
        )
    guard.start()
    dist.barrier()
    report.startup["total_s"] = process_age_s()
    reached, why = {}, ""
    try:
        val_loss, val_accuracy = trainer.train()
        reached = {"val_loss": val_loss, "val_accuracy": val_accuracy}
        text = f"accuracy {val_accuracy:.1%}, validation loss {val_loss:.4f}"
    except Stopped as stopped:
        why = str(stopped)
    guard.close()
    trainer.windows.finish()
    dist.barrier()
    now, age_s = time.strftime("%H:%M:%S"), process_age_s()
    status, code = ("preempted", Exit.AGAIN) if why else ("ok", Exit.OK)
    report.record("run_end", status=status, reason=why, total_time_s=age_s, **reached)
    if job.place.rank == 0:
        write_outcome(job.paths, job.attempt, status, code, why)
    report.say(f"stopped early at {now}: {why}" if why else f"done at {now}: {text}, {age_s:.1f} s")
    # Rank 0 may serve the store that the others need to shut down: all leave together.
    dist.barrier()


def _guard(job: RankJob, trainer: Trainer) -> JobGuard:
    """Resume from the newest valid checkpoint; return the training's guard. Every rank calls.

    Raises UsageError, on every rank, for a checkpoint of a different configuration.
    """
    spec, group, rank = trainer.spec, trainer.group, job.place.rank
    checkpoints = None
    if paths := job.paths:
        on_cpu, report = group.on_cpu(), trainer.report
        checkpoints = Checkpoints(paths, job.attempt, on_cpu, report, spec)
        # Those that rank 0 finds: a file system may not show all ranks the same.
        listed = all_or_raise(lambda: [] if rank else candidates(job, paths), UsageError)
        folders = group.gather(listed)[0]
        loaded = resume(trainer, on_cpu, folders, must=job.resume_from is not None)
        if loaded and trainer.finished:
            report.warn(
                "training is already complete: the checkpoint is from after the last of --epochs "
                "or --max-steps"
            )
        if loaded and loaded.parent == paths.checkpoints:
            checkpoints.newest = trainer.progress.iteration
    return JobGuard(
        spec,
        group=group.on_cpu(),  # its own: it may be at work while a checkpoint is written
        stop=job.stop,
        checkpoints=checkpoints,
        fault=read_fault(job.attempt, rank, job.paths),
        device=group.device.type,
        log=trainer.report.stream,
    )


def candidates(job: RankJob, paths: RunPaths) -> list[Path]:
    """The checkpoints that the job may resume from, the newest first: the run's own before others.

    A job that is started again has the same options: what it has done since counts.
    """
    named = job.resume_from
    return of_own_run(paths, job.attempt) or (named_by_user(named) if named else [])


def _record_failure(job: RankJob, report: Reporter, error: Exception) -> None:
    """Record that the run failed and why; the reason of the first rank to fail is kept."""
    if isinstance(error, UsageError):
        code, reason = Exit.USAGE, str(error)
    else:
        cause = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        code = Exit.THRESHOLD if isinstance(error, RanksDiffer) else Exit.FAILED
        reason = f"rank {job.place.rank}: {cause}"
        if job.paths and ("imed out" in cause or "timeout" in cause):  # of a collective
            folder = job.paths.rank_log(job.attempt, job.place.rank).parent
            reason += f"; a rank that hung left its stacks in {folder}"
        report.log(traceback.format_exc().rstrip(), "ERROR")
    reason = write_outcome(job.paths, job.attempt, "failed", code, reason)
    age_s = process_age_s()
    report.record("run_end", status="failed", reason=reason[:500], total_time_s=age_s)
