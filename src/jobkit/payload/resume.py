"""Resuming from a checkpoint: which one, and which of its tensors each rank takes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobkit.errors import UsageError
from jobkit.paths import RunPaths, read_json
from jobkit.payload.checkpoint import (
    BUFFER,
    CPU_STATE,
    GPU_STATE,
    LOSS_SUM,
    MANIFEST,
    STRATEGY,
    Checkpoint,
    Corrupt,
    Group,
    attempt_of,
    check,
    found_in,
    shared_tensors,
)
from jobkit.payload.device import seed_rank
from jobkit.payload.distributed import gather

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

# A checkpoint fits a run of the same model; in the middle of an epoch, of the same samples too.
_OF_MODEL = ("model", "width", "hidden", "optimizer", "speed_run")
_OF_ORDER = ("dataset", "train_samples", "train_split", "seed", "repeat")


def of_own_run(paths: RunPaths, attempt: int) -> list[Path]:
    """The checkpoints that an attempt may resume from, the newest first.

    Those of an attempt that completed, and before it, are another training's.
    """
    first = 0
    for n in (n for n in paths.attempt_numbers() if n < attempt):
        if (read_json(paths.outcome(n)) or {}).get("status") == "ok":
            first = n + 1
    return [
        folder for folder in found_in(paths.checkpoints) if first <= attempt_of(folder) < attempt
    ]


def named_by_user(path: Path) -> list[Path]:
    """The checkpoints of --resume-from: one, or those of a run's folder, the newest first.

    Raises UsageError if there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    if folders := found_in(path / "checkpoints") or found_in(path):
        return folders
    raise UsageError(
        f"--resume-from {path}: no checkpoint there; name a run's folder, or one in its "
        "checkpoints/"
    )


def resume(trainer: "Trainer", group: Group, candidates: list[Path], must: bool) -> Path | None:
    """Resume from the first valid checkpoint; return it, None without one.

    A corrupt one is reported and skipped. must: the user named them. Raises UsageError, on every
    rank, for one of a different configuration, and if none is valid of those that the user named,
    or of those whose reading has begun.
    """
    report, begun = trainer.report, False
    for folder in candidates:
        started = time.monotonic()
        try:
            checkpoint = check(folder, group)
            _check_fits(checkpoint, trainer, group)
            begun = True
            _load(checkpoint, trainer, group)
        except Corrupt as error:
            report.warn(f"checkpoint {folder.name} is corrupt, skipped: {error}")
            iteration = folder.name.partition("-")[0]
            at = int(iteration) if iteration.isdecimal() else None
            report.record("checkpoint", action="rejected", iteration=at)
            continue
        progress, layout = checkpoint.progress, checkpoint.layout
        trainer.progress = progress
        report.record(
            "checkpoint",
            action="loaded",
            iteration=progress.iteration,
            epoch=progress.epoch,
            bytes=sum(entry["bytes"] for entry in checkpoint.files.values()),
            time_s=time.monotonic() - started,
        )
        text = f"resuming from {folder}: iteration {progress.iteration}"
        text += f", epoch {progress.epoch + 1}, sample {progress.position:,} of it"
        if layout != trainer.strategy.layout():
            text += f" (written by {layout.get('strategy')} at {layout.get('world_size')} ranks)"
        report.say(text)
        return folder
    if candidates and (must or begun):  # begun: the model is half of a checkpoint's by now
        how = "leave out --resume-from" if must else "remove that folder"  # no other run's
        raise UsageError(
            f"no valid checkpoint in {candidates[0].parent}: to begin from scratch, {how}"
        )
    if candidates:
        report.warn("no valid checkpoint: the run starts from scratch")
    return None


def _check_fits(checkpoint: Checkpoint, trainer: "Trainer", group: Group) -> None:
    """Raise UsageError, on every rank, for a checkpoint of another model, or of other samples."""
    ours = vars(trainer.spec)
    for name in _OF_MODEL + (_OF_ORDER if checkpoint.progress.position else ()):
        theirs = checkpoint.spec.get(name, ours[name])
        if theirs != ours[name]:
            raise UsageError(
                f"{checkpoint.folder} belongs to a different configuration: {name} is {theirs!r} "
                f"there and {ours[name]!r} here"
            )
    here, parameters = trainer.strategy.parameter_count, trainer.strategy.named_parameters()
    shapes = {n: size for n, (size, _) in checkpoint.shapes.items() if n.startswith("model.")}
    there = sum(size.numel() for size in shapes.values())
    # That of a parameter which is absent here would not be missed.
    alike = all(shapes.get(f"model.{n}") == p.shape for n, p in parameters.items())
    if not all(gather(alike and there == here, group)):
        raise UsageError(
            f"{checkpoint.folder} belongs to a different configuration: its model has {there:,} "
            f"parameters, and this one {here:,}, of other names or shapes"
        )


def _load(checkpoint: Checkpoint, trainer: "Trainer", group: Group) -> None:
    """Fill model, optimizer and this rank's own state. Raises Corrupt."""
    rank, strategy = trainer.group.place.rank, trainer.strategy
    shapes, writers = checkpoint.shapes, checkpoint.writers
    same = checkpoint.layout == strategy.layout()
    owners = [rank] if same else writers
    if not writers or not set(owners) <= set(writers):
        raise Corrupt("it lacks the ranks' own state")
    _prime(trainer)
    # The checkpoint lacks the optimizer's state of a parameter that never had a gradient.
    for name, state in strategy.optimizer_state(trainer.optimizer).items():
        if not any(f"optim.{name}.{key}" in shapes for key in state):
            state.clear()
    tensors, parts = shared_tensors(trainer), []
    for prefix in (f"rank.{owner}." for owner in owners):
        blank = checkpoint.blank(prefix)
        tensors |= blank
        parts.append({name.removeprefix(prefix): tensor for name, tensor in blank.items()})
    checkpoint.read(tensors, group)
    own = parts[0] if same else merged(parts, rank)
    for name, buffer in strategy.named_buffers().items():
        if f"{BUFFER}{name}" in own:
            buffer.copy_(own[f"{BUFFER}{name}"])
    strategy.take_own_state(
        {k.removeprefix(STRATEGY): t for k, t in own.items() if k.startswith(STRATEGY)}
    )
    trainer.loss_sum = own[LOSS_SUM].to(trainer.loss_sum)
    if CPU_STATE in own:
        torch.set_rng_state(own[CPU_STATE])
    if GPU_STATE in own and strategy.device.type == "cuda":
        torch.cuda.set_rng_state(own[GPU_STATE], strategy.device)
    if not same:
        seed_rank(trainer.spec.seed + trainer.spec.repeat, rank, checkpoint.progress.iteration)


def _prime(trainer: "Trainer") -> None:
    """Have the optimizer and the strategy make the state of their first iteration.

    Its values do not matter: a checkpoint is loaded over them.
    """
    strategy, optimizer = trainer.strategy, trainer.optimizer
    strategy.warm_up()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in strategy.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    strategy.scaler.scale(trainer.loss_sum)  # that of fp16 takes no step before
    strategy.optimizer_step(optimizer)


def merged(ranks: list[dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """The own tensors of a rank in another layout, merged from those of all ranks.

    Buffers are averaged over the ranks that have them, as for an evaluation; rank 0 gets the sum
    of the epoch's losses. Random numbers are not merged: the ranks begin from seeds of the
    iteration.
    """
    tensors = {n: t for n, t in ranks[0].items() if n.startswith(f"{STRATEGY}scaler.")}
    for name in dict.fromkeys(k for own in ranks for k in own if k.startswith(BUFFER)):
        values = torch.stack([own[name] for own in ranks if name in own])
        tensors[name] = values.mean(0) if values.is_floating_point() else values[0]
    losses = torch.stack([own[LOSS_SUM] for own in ranks])
    tensors[LOSS_SUM] = losses.sum() * (rank == 0)
    return tensors
