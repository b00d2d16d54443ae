"""The folder of an export: the model in a format, eight images, expected outputs, a manifest."""

import copy
import importlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from jobkit.errors import UsageError, one_line
from jobkit.export.weights import Trained
from jobkit.paths import write_json
from jobkit.payload.batches import MEAN, STD
from jobkit.permissions import keep_compiler_cache

FILES = {"aoti": "model.pt2", "onnx": "model.onnx", "state_dict": "model.pt"}
_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-5  # of the largest logit, or of 1 where all are smaller
# Of the Jacobian's 2-norm: ReLU's derivative jumps at 0, so that a rounding moves some entries.
JACOBIAN_TOLERANCE = 1e-3
# AVX2 on x86: servers since about 2015 have it. Inductor would write for the widest vectors of the
# machine that compiles, whatever the compiler is told. Another processor compiles for itself.
_X86 = platform.machine() in ("x86_64", "AMD64")
_MARCH, _VECTOR_BITS = ("x86-64-v3", 256) if _X86 else ("native", None)

Run = Callable[[Tensor], Tensor]


class Deployed(nn.Module):
    """A model with the normalisation of its input: pixels (N, 3, 32, 32), 0 to 255, to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(MEAN).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).reshape(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels (N, 3, 32, 32) fp32, 0 to 255, to logits (N, classes)."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits


def check_tools(to: str) -> None:
    """Raise UsageError, or ModuleNotFoundError, for what the format needs and is not there."""
    for package in _OF_ONNX if to == "onnx" else ():
        importlib.import_module(package)
    compiler = os.environ.get("CXX") or "g++"
    if to == "aoti" and not shutil.which(compiler):
        raise UsageError(
            f"--to aoti compiles C++, and there is no '{compiler}' on PATH: install g++, name a "
            "compiler in CXX, or take --to onnx"
        )


def write_folder(
    folder: Path, trained: Trained, to: str, max_batch: int, with_jacobian: bool
) -> tuple[float, float | None]:
    """Write all files into an empty folder, and load the model again to compare it.

    Returns the largest difference of logits, and that of the Jacobian if there is one, in the units
    of their tolerances. Raises UsageError for a model that cannot be exported.
    """
    model, images = Deployed(trained.model).eval(), example_images()
    pixels = images.to(torch.float32)
    with torch.inference_mode():
        expected = model(pixels)
    (folder / "images.u8").write_bytes(images.numpy().tobytes())
    (folder / "expected.f32").write_bytes(expected.numpy().tobytes())
    path = folder / FILES[to]
    write(model, path, to, max_batch)
    difference = _difference(load(to, path, model), model, pixels, max_batch)
    jacobian = _jacobian(folder, model, pixels[:1]) if with_jacobian else None
    manifest: dict[str, Any] = {
        "format": to,
        "model": trained.spec.model,
        "checkpoint": trained.folder.name,
        "iteration": trained.iteration,
        "difference": difference,
        "jacobian_difference": jacobian,
        "torch": torch.__version__,
    }
    if to != "state_dict":
        manifest["max_batch"] = max_batch  # hpc/inference reads it
    write_json(folder / "manifest.json", manifest)
    return difference, jacobian


def example_images() -> Tensor:
    """Eight images (8, 3, 32, 32) uint8 of random pixels: no data set is needed."""
    generator = torch.Generator().manual_seed(16)
    return torch.randint(0, 256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8)


def write(model: Deployed, path: Path, to: str, max_batch: int) -> None:
    """Write the model in a format. Raises UsageError for a model that cannot be exported."""
    if to == "state_dict":
        torch.save(model.model.state_dict(), path)
        return
    # An example of several images, or their number would be a constant; from 1 by the range's end.
    pixels = torch.zeros(min(8, max_batch), 3, 32, 32)
    shapes = ({0: torch.export.Dim("batch", min=1, max=max_batch)} if max_batch > 1 else {},)
    if to == "aoti":
        _compile(model, pixels, shapes, path)
        return
    with _one_line_of_errors():
        program = torch.onnx.export(
            model, (pixels,), dynamo=True, dynamic_shapes=shapes, verbose=False,
            input_names=["pixels"], output_names=["logits"],
        )  # fmt: skip
    assert program is not None
    program.save(str(path), external_data=False)


def _compile(model: nn.Module, pixels: Tensor, shapes: Any, path: Path) -> None:
    """Write a module as a package of AOTInductor."""
    keep_compiler_cache()
    # The number of threads is the user's at run time, not that of the machine that compiles.
    options: dict[str, Any] = {"cpp.dynamic_threads": True}
    options |= {"cpp.march": _MARCH, "cpp.simdlen": _VECTOR_BITS}
    if compiler := os.environ.get("CXX"):
        options["cpp.cxx"] = (None, compiler)
    with _one_line_of_errors():
        program = torch.export.export(model, (pixels,), dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )


@contextmanager
def _one_line_of_errors() -> Iterator[None]:
    """Make any error of torch's exporters one line of the user's: they raise all kinds."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the model cannot be exported: {one_line(first)} (its forward must not branch on "
            "values; --to state_dict takes any model)"
        ) from None


def load(to: str, path: Path, model: Deployed) -> Run:
    """What a user of the file runs: a function of pixels to logits."""
    if to == "aoti":
        package: Run = torch._inductor.aoti_load_package(str(path))
        return package
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda pixels: torch.from_numpy(session.run(None, {name: pixels.numpy()})[0])
    fresh = copy.deepcopy(model)
    for tensor in fresh.model.state_dict().values():
        tensor.zero_()  # so that nothing but the file's content can be right
    fresh.model.load_state_dict(torch.load(path, weights_only=True))
    return fresh


def _difference(run: Run, model: Deployed, pixels: Tensor, max_batch: int) -> float:
    """The largest difference of logits, in batches of one image, of several and of many."""
    worst = torch.zeros(())
    with torch.inference_mode():
        scale = model(pixels).abs().max().clamp_min(1)
        for size in sorted({min(size, max_batch) for size in (1, len(pixels), 1024)}):
            for part in pixels.repeat(-(-size // len(pixels)), 1, 1, 1).split(size):
                # maximum, not max: it keeps a NaN.
                worst = torch.maximum(worst, (run(part) - model(part)).abs().max())
    return (worst / scale).item()


def _jacobian(folder: Path, model: Deployed, image: Tensor) -> float:
    """Write the derivative of logits by an image as a package, and its values; their difference.

    (1, 3, 32, 32) to (1, classes, 3, 32, 32). Its operations are traced before they are exported,
    as AOTInductor takes no torch.func.
    """

    def derivative(pixels: Tensor) -> Tensor:
        return torch.func.jacrev(model)(pixels).squeeze(2)

    expected, path = derivative(image).contiguous(), folder / "jacobian.pt2"
    (folder / "jacobian.f32").write_bytes(expected.numpy().tobytes())
    _compile(make_fx(derivative)(image), image, None, path)
    difference: float = (load("aoti", path, model)(image) - expected).norm().item()
    return difference / expected.norm().item()
