"""The trained model of a run, from its newest sound checkpoint, of any strategy and rank count."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.paths import RunPaths, short_path
from jobkit.payload.checkpoint import (
    MANIFEST,
    Corrupt,
    Manifest,
    check,
    found_in,
    read,
    shapes_in,
    writers,
)
from jobkit.payload.model import build_model
from jobkit.payload.resume import merged
from jobkit.spec.runspec import RunSpec, check_keys

_MAX_CLASSES = 100_000
_MODEL = "model."
_BUFFER = "buffer."


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode on the CPU, and where it came from."""

    model: nn.Module
    spec: RunSpec
    classes: int
    folder: Path  # of the checkpoint
    manifest: Manifest


def trained_model(run: Path, own_model: str | None, warn: Callable[[str], None]) -> Trained:
    """The model of a run's folder, or of one checkpoint's.

    own_model: the user's word that the run's model may be imported: a checkpoint alone executes no
    code. Corrupt checkpoints are reported and skipped. Raises UsageError where none can be used.
    """
    for folder in _candidates(run):
        try:
            return _read(folder, own_model)
        except Corrupt as error:
            warn(f"checkpoint {folder.name} is corrupt, skipped: {error}")
    raise UsageError(f"{short_path(run)}: no sound checkpoint among those there")


def _candidates(run: Path) -> list[Path]:
    """The checkpoints to try, the newest first. Raises UsageError if there is none."""
    if (run / MANIFEST).is_file():
        return [run]
    if found := found_in(RunPaths(run).checkpoints):
        return found
    raise UsageError(
        f"{short_path(run)}: no checkpoint there; name a run's folder, or one in its checkpoints/ "
        "(a run writes them with --checkpoint-every epoch)"
    )


def _read(folder: Path, own_model: str | None) -> Trained:
    """The model of one checkpoint. Raises Corrupt; UsageError where the model cannot be made."""
    manifest, index = check(folder)
    try:
        check_keys(manifest.spec)
        spec = RunSpec(**manifest.spec)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"its settings cannot be used: {error}") from None
    if ":" in spec.model and spec.model != own_model:
        raise UsageError(
            f"{short_path(folder)}: the model is {spec.model!r}, code that is not jobkit's: to "
            f"import it, say --model {spec.model}"
        )
    if own_model and spec.model != own_model:
        raise UsageError(
            f"{short_path(folder)}: the model is jobkit's own {spec.model!r}: leave out --model"
        )
    shapes = shapes_in(index)
    wanted = {n.removeprefix(_MODEL): s for n, (s, _) in shapes.items() if n.startswith(_MODEL)}
    model, classes = _built(spec, wanted, folder)
    own = tuple(f"rank.{rank}." for rank in writers(shapes))
    tensors = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in shapes.items()
        if name.startswith((_MODEL, *own))
    }
    read(folder, index, tensors)
    _fill(model, tensors, own)
    return Trained(model.eval().requires_grad_(False), spec, classes, folder, manifest)


def _built(spec: RunSpec, wanted: dict[str, torch.Size], folder: Path) -> tuple[nn.Module, int]:
    """The model with the checkpoint's parameters, and its number of classes.

    No setting says the number of classes: it is that with which the shapes agree.
    """
    reason = "its parameters have other names or shapes"
    for classes in sorted({size[0] for size in wanted.values() if size}):
        if not 0 < classes <= _MAX_CLASSES:
            continue
        try:
            model = build_model(spec, classes)
        except UsageError as error:
            reason = str(error)
            continue
        if {name: p.shape for name, p in model.named_parameters()} == wanted:
            return model, classes
    raise UsageError(f"{short_path(folder)} does not fit the model {spec.model}: {reason}")


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor], own: tuple[str, ...]) -> None:
    """Copy parameters and buffers; buffers are the mean over the ranks, as for an evaluation."""
    if not own:
        raise Corrupt("it lacks the ranks' own state")
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[_MODEL + name])
    ranks = [
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in own
    ]
    buffers = merged(ranks, 0)
    for name, buffer in model.named_buffers():
        if _BUFFER + name not in buffers:
            raise Corrupt(f"it lacks the buffer {name}")
        buffer.copy_(buffers[_BUFFER + name])
