"""The folder of an export: the model, eight images, the outputs expected of them, a manifest."""

import hashlib
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobkit import __version__
from jobkit.export import formats
from jobkit.export.formats import Deployed, jacobian_of
from jobkit.export.weights import Trained
from jobkit.paths import write_json
from jobkit.payload.batches import MEAN, STD

IMAGES, EXPECTED, EXPECTED_JACOBIAN = "images.u8", "expected.f32", "jacobian.f32"
TOLERANCE = 1e-5  # of the largest logit, or of 1 where all are smaller
# Of the Jacobian's 2-norm: ReLU's derivative jumps at 0, so that a rounding moves some entries.
JACOBIAN_TOLERANCE = 1e-3
_SEED = 16
_MOST_COMPARED = 1024  # images in one batch


@dataclass(frozen=True)
class Wanted:
    """What to export."""

    to: str
    max_batch: int
    march: str
    jacobian: bool


@dataclass(frozen=True)
class Checked:
    """How far the loaded files are from the model that was trained."""

    difference: float  # of TOLERANCE's unit
    jacobian: float | None  # of JACOBIAN_TOLERANCE's unit

    @property
    def agrees(self) -> bool:
        """Whether the files may be used; NaN may not."""
        fine = self.difference <= TOLERANCE
        return fine and (self.jacobian is None or self.jacobian <= JACOBIAN_TOLERANCE)


def write_folder(folder: Path, trained: Trained, wanted: Wanted) -> Checked:
    """Write all files into an empty folder, load the model again and compare it.

    Raises UsageError for a model that cannot be exported.
    """
    model = Deployed(trained.model).eval()
    images = example_images()
    pixels = images.to(torch.float32)
    with torch.inference_mode():
        expected = model(pixels)
    (folder / IMAGES).write_bytes(images.numpy().tobytes())
    (folder / EXPECTED).write_bytes(expected.numpy().tobytes())
    path = folder / formats.FILES[wanted.to]
    formats.write(wanted.to, model, path, wanted.max_batch, wanted.march)
    run = formats.load(wanted.to, path, model)
    difference = _difference(run, model, pixels, wanted.max_batch)
    found = Checked(difference, _jacobian(folder, model, pixels, wanted))
    write_json(folder / "manifest.json", _manifest(folder, trained, wanted, found))
    return found


def example_images() -> Tensor:
    """Eight images (8, 3, 32, 32) uint8 of random pixels: no data set is needed."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8)


def _difference(run: formats.Run, model: Deployed, pixels: Tensor, max_batch: int) -> float:
    """The largest difference of logits, in batches of one image, of several and of many."""
    sizes = sorted({min(size, max_batch) for size in (1, len(pixels), _MOST_COMPARED)})
    worst = torch.zeros(())
    with torch.inference_mode():
        scale = model(pixels).abs().max().clamp_min(1)
        for size in sizes:
            for part in pixels.repeat(-(-size // len(pixels)), 1, 1, 1).split(size):
                # maximum, not max: it keeps a NaN.
                worst = torch.maximum(worst, (run(part) - model(part)).abs().max())
    return (worst / scale).item()


def _jacobian(folder: Path, model: Deployed, pixels: Tensor, wanted: Wanted) -> float | None:
    """Write the Jacobian's package and its values for the first image; their difference."""
    if not wanted.jacobian:
        return None
    one = pixels[:1]
    expected = torch.func.jacrev(model)(one).squeeze(2).contiguous()
    module = jacobian_of(model, one)
    (folder / EXPECTED_JACOBIAN).write_bytes(expected.numpy().tobytes())
    path = folder / formats.JACOBIAN
    formats.compiled(module, one, None, path, wanted.march)
    found = formats.load("aoti", path, model)(one)
    difference: float = ((found - expected).norm() / expected.norm()).item()
    return difference


def _manifest(folder: Path, trained: Trained, wanted: Wanted, found: Checked) -> dict[str, Any]:
    """What is in the folder, where it came from, and what may run it."""
    progress, layout = trained.manifest.progress, trained.manifest.layout
    inside = wanted.to != "state_dict"
    made: dict[str, Any] = {
        "v": 1,
        "format": wanted.to,
        "model": trained.spec.model,
        "checkpoint": trained.folder.name,
        "iteration": progress.iteration,
        "strategy": layout.get("strategy"),
        "world_size": layout.get("world_size"),
        "input": {"dtype": "float32", "shape": ["batch", 3, 32, 32], "range": [0, 255]},
        "output": {"dtype": "float32", "shape": ["batch", trained.classes]},
        "normalisation": {"mean": MEAN, "std": STD, "in_the_model": inside},
        "tolerance": TOLERANCE,
        "difference": found.difference,
        "versions": _versions(wanted.to),
        "files": {path.name: _file(path) for path in sorted(folder.iterdir())},
    }
    if inside:
        made["input"]["max_batch"] = wanted.max_batch
    if wanted.to == "aoti":
        made["instruction_set"] = {"machine": platform.machine(), "march": wanted.march}
    if found.jacobian is not None:
        made["jacobian"] = {
            "shape": [1, trained.classes, 3, 32, 32],
            "tolerance": JACOBIAN_TOLERANCE,
            "difference": found.jacobian,
        }
    return made


def _versions(to: str) -> dict[str, str]:
    """The versions of what wrote the files."""
    packages = ("onnx", "onnxscript", "onnxruntime") if to == "onnx" else ()
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return {"jobkit": __version__, **found, **{name: metadata.version(name) for name in packages}}


def _file(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
