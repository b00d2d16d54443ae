"""The trained model of a run, from its newest sound checkpoint, of any strategy and rank count."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.paths import RunPaths, short_path
from jobkit.payload.checkpoint import BUFFER, MANIFEST, Corrupt, check, found_in
from jobkit.payload.model import build_model
from jobkit.payload.resume import merged
from jobkit.spec.runspec import RunSpec, check_keys

_MODEL = "model."


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode on the CPU, and where it came from."""

    model: nn.Module
    spec: RunSpec
    folder: Path  # of the checkpoint
    iteration: int


def trained_model(run: Path, own_model: str | None, warn: Callable[[str], None]) -> Trained:
    """The model of a run's folder, or of one checkpoint's.

    own_model: the user's word that the run's model may be imported: a checkpoint alone executes no
    code. Corrupt checkpoints are reported and skipped. Raises UsageError where none can be used.
    """
    is_one = (run / MANIFEST).is_file()
    for folder in [run] if is_one else found_in(RunPaths(run).checkpoints):
        try:
            return _read(folder, own_model)
        except Corrupt as error:
            warn(f"checkpoint {folder.name} is corrupt, skipped: {error}")
    raise UsageError(
        f"{short_path(run)}: no sound checkpoint there; name a run's folder, or one in its "
        "checkpoints/ (a run writes them with --checkpoint-every epoch)"
    )


def _read(folder: Path, own_model: str | None) -> Trained:
    """The model of one checkpoint. Raises Corrupt; UsageError where the model cannot be made."""
    checkpoint = check(folder)
    try:
        check_keys(checkpoint.spec)
        spec = RunSpec(**checkpoint.spec)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"its settings cannot be used: {error}") from None
    if own_model != (spec.model if ":" in spec.model else None):
        fix = "leave out --model"
        if ":" in spec.model:
            fix = f"that is code of somebody's own: to import it, say --model {spec.model}"
        raise UsageError(f"{short_path(folder)}: the model is {spec.model!r}: {fix}")
    own = [f"rank.{rank}." for rank in checkpoint.writers]
    if not own:
        raise Corrupt("it lacks the ranks' own state")
    tensors = checkpoint.blank(_MODEL, *own)
    checkpoint.read(tensors)
    values = _without(_MODEL, tensors)
    misfit = f"{short_path(folder)} does not fit the model {spec.model}"
    try:
        model = build_model(spec, checkpoint.classes)
    except UsageError as error:
        raise UsageError(f"{misfit}: {error}") from None
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes != {name: tensor.shape for name, tensor in values.items()}:
        raise UsageError(f"{misfit}: its parameters have other names or shapes")
    # Buffers are the mean over the ranks, as for an evaluation.
    values |= _without(BUFFER, merged([_without(prefix, tensors) for prefix in own], 0))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in values:
                raise Corrupt(f"it lacks {name}")
            tensor.copy_(values[name])
    model.eval().requires_grad_(False)
    return Trained(model, spec, folder, checkpoint.progress.iteration)


def _without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
