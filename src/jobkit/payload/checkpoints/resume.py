"""Resuming from a checkpoint: which one, and which of its tensors each rank takes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jobkit.errors import UsageError
from jobkit.paths import RunPaths, read_json, short_path
from jobkit.payload import random_numbers
from jobkit.payload.checkpoints import state
from jobkit.payload.checkpoints import store as checkpoint
from jobkit.payload.checkpoints.manifest import MANIFEST, Corrupt, Manifest
from jobkit.payload.checkpoints.store import Shapes, Store
from jobkit.payload.progress import Progress
from jobkit.spec.runspec import RunSpec

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

# A checkpoint fits a run of the same model; in the middle of an epoch, of the same samples too.
_OF_MODEL = ("model", "width", "hidden", "optimizer", "lookahead_every")
_OF_ORDER = ("dataset", "train_samples", "train_split", "seed", "repeat")


def of_own_run(paths: RunPaths, attempt: int) -> list[Path]:
    """The checkpoints that an attempt may resume from, the newest first.

    Those before an attempt that completed, or that started from scratch, are another training's.
    """
    first = 0
    for n in paths.attempt_numbers():
        if n < attempt and paths.fresh_start(n).exists():
            first = n
        if n < attempt and (read_json(paths.outcome(n)) or {}).get("status") == "ok":
            first = n + 1
    return [
        folder
        for folder in checkpoint.found_in(paths.checkpoints)
        if first <= checkpoint.attempt_of(folder) < attempt
    ]


def mark_fresh_start(paths: RunPaths, attempt: int) -> None:
    """Mark the attempt as one that resumes from no earlier attempt of the run."""
    mark = paths.fresh_start(attempt)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def named_by_user(path: Path) -> list[Path]:
    """The checkpoints of --resume-from: one, or those of a run's folder, the newest first.

    Raises UsageError if there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    found = checkpoint.found_in(path / "checkpoints") or checkpoint.found_in(path)
    if not found:
        raise UsageError(
            f"--resume-from {path}: no checkpoint there; name a run's folder, or one in its "
            "checkpoints/"
        )
    return found


def resume(trainer: "Trainer", store: Store, candidates: list[Path], must: bool) -> Path | None:
    """Resume from the first valid checkpoint; return it, None without one.

    A corrupt one is reported and skipped. must: the user named them. Raises UsageError, on every
    rank, for one of a different configuration, and if the user named some and none is valid.
    """
    report, initial = trainer.report, None
    for folder in candidates:
        started = time.monotonic()
        try:
            manifest, index = store.check(folder)
            _check_fits(manifest, trainer.spec, folder)
            shapes = checkpoint.shapes_in(index)
            _check_shapes(trainer, store, shapes, folder)
            initial = initial or state.Initial(trainer)
            _load(trainer, store, folder, manifest, index)
        except Corrupt as error:
            report.warn(f"checkpoint {folder.name} is corrupt, skipped: {error}")
            report.record("checkpoint", action="rejected", iteration=_iteration(folder))
            continue
        trainer.progress = Progress(**vars(manifest.progress))
        report.record(
            "checkpoint",
            action="loaded",
            iteration=manifest.progress.iteration,
            epoch=manifest.progress.epoch,
            bytes=manifest.bytes,
            time_s=time.monotonic() - started,
        )
        report.say(_resumed(folder, manifest, trainer))
        if trainer.finished:
            report.warn(
                "training is already complete: the checkpoint is from after the last of --epochs "
                "or --max-steps"
            )
        return folder
    if candidates and must:
        raise UsageError(f"--resume-from: no valid checkpoint in {candidates[0].parent}")
    if candidates:
        report.warn("no valid checkpoint: the run starts from scratch")
    if initial:
        initial.put_back(trainer)
    return None


def _iteration(folder: Path) -> int | None:
    first = folder.name.partition("-")[0]
    return int(first) if first.isdecimal() else None


def _resumed(folder: Path, manifest: Manifest, trainer: "Trainer") -> str:
    progress, layout = manifest.progress, manifest.layout
    text = f"resuming from {short_path(folder)}: iteration {progress.iteration}"
    text += f", epoch {progress.epoch + 1}, sample {progress.position:,} of it"
    if layout != trainer.strategy.layout():
        text += f" (written by {layout.get('strategy')} at {layout.get('world_size')} ranks)"
    return text


def _check_fits(manifest: Manifest, spec: RunSpec, folder: Path) -> None:
    """Raise UsageError for a checkpoint of another model, or of other samples."""
    names = _OF_MODEL + (_OF_ORDER if manifest.progress.position else ())
    own = spec.to_dict()
    for name in names:
        theirs = manifest.spec.get(name, own[name])
        if theirs != own[name]:
            raise UsageError(
                f"{folder} belongs to a different configuration: {name} is {theirs!r} there and "
                f"{own[name]!r} here"
            )


def _check_shapes(trainer: "Trainer", store: Store, shapes: Shapes, folder: Path) -> None:
    """Raise UsageError, on every rank, where the model's parameters are not the checkpoint's."""
    held = {f"model.{n}": p.shape for n, p in trainer.strategy.named_parameters().items()}
    own = {name: shape for part in store.everyone(held) for name, shape in part.items()}
    theirs = {name: size for name, (size, _) in shapes.items() if name.startswith("model.")}
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            ours, there = (
                f"of shape {tuple(side[name])}" if name in side else "absent"
                for side in (own, theirs)
            )
            raise UsageError(
                f"{folder} belongs to a different configuration: parameter "
                f"{name.removeprefix('model.')} is {there} there and {ours} here"
            )


def _load(trainer: "Trainer", store: Store, folder: Path, manifest: Manifest, index: Any) -> None:
    """Fill model, optimizer and this rank's own state. Raises Corrupt."""
    shapes = checkpoint.shapes_in(index)
    rank, writers = trainer.group.place.rank, state.writers(shapes)
    same = manifest.layout == trainer.strategy.layout()
    owners = [rank] if same else writers
    if not writers or not set(owners) <= set(writers):
        raise Corrupt("it lacks the ranks' own state")
    state.prime(trainer)
    state.forget_absent(trainer, shapes)
    wanted = state.shared_tensors(trainer)
    parts = []
    for prefix in map(state.own_prefix, owners):
        # Tensors to fill: all that belong to this owner.
        blank = {
            n: torch.empty(size, dtype=dtype)
            for n, (size, dtype) in shapes.items()
            if n.startswith(prefix)
        }
        wanted |= blank
        parts.append({name.removeprefix(prefix): tensor for name, tensor in blank.items()})
    store.read(folder, index, wanted)
    state.take_own(trainer, parts[0] if same else state.merged(parts, rank))
    if not same:
        spec, devices = trainer.spec, trainer.strategy.devices
        iteration = manifest.progress.iteration
        random_numbers.begin(spec.seed + spec.repeat, rank, devices, iteration)
