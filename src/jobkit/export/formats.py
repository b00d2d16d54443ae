"""The formats: how each is written from a model in eval mode, and how it is loaded again."""

import copy
import importlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from jobkit.errors import UsageError
from jobkit.payload.batches import MEAN, STD
from jobkit.permissions import keep_compiler_cache

FILES = {"aoti": "model.pt2", "onnx": "model.onnx", "state_dict": "model.pt"}
JACOBIAN = "jacobian.pt2"
# Bits of the vectors that Inductor writes for each --march; else it takes the widest of the machine
# that compiles, whatever the compiler was told. 1: none.
_VECTORS = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512, "native": None}
_NEEDS = {"x86-64-v3": ("AVX2", "AVX512"), "x86-64-v4": ("AVX512",)}

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


def jacobian_of(model: nn.Module, pixels: Tensor) -> nn.Module:
    """The derivative of a model's logits by one image: (1, 3, 32, 32) to (1, classes, 3, 32, 32).

    Its operations are traced before they are exported: AOTInductor takes no torch.func.
    """
    derivative = torch.func.jacrev(model)
    made: nn.Module = make_fx(lambda x: derivative(x).squeeze(2))(pixels)
    return made


def default_march() -> str:
    """x86-64-v3, which servers since about 2015 have, where this machine is one; else native."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return "x86-64-v3" if x86 and _has("x86-64-v3") else "native"


def _has(march: str) -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return march not in _NEEDS or capability in _NEEDS[march]


def check_tools(to: str, march: str) -> None:
    """Raise UsageError, or ModuleNotFoundError, for what the format needs and is not there."""
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            importlib.import_module(package)
    if to != "aoti":
        return
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(compiler):
        raise UsageError(
            f"--to aoti compiles C++, and there is no '{compiler}' on PATH: install g++, name a "
            "compiler in CXX, or take --to onnx"
        )
    if march != "native" and platform.machine() not in ("x86_64", "AMD64"):
        raise UsageError(f"--march {march}: this machine is {platform.machine()}: say native")
    if not _has(march):
        raise UsageError(
            f"--march {march}: this machine has not these instructions, and could not check the "
            "result: export on one that has them, or choose another --march"
        )


def write(to: str, model: Deployed, path: Path, max_batch: int, march: str) -> None:
    """Write the model in a format. Raises UsageError for a model that cannot be exported."""
    if to == "state_dict":
        torch.save(model.model.state_dict(), path)
        return
    # An example of several images, or their number would be a constant; from 1 by the range's end.
    pixels = torch.zeros(min(8, max_batch), 3, 32, 32)
    batch = torch.export.Dim("batch", min=1, max=max_batch) if max_batch > 1 else None
    shapes = ({0: batch} if batch else {},)
    if to == "aoti":
        keep_compiler_cache()
        compiled(model, pixels, shapes, path, march)
        return
    with _exportable():
        made = torch.onnx.export(
            model,
            (pixels,),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["pixels"],
            output_names=["logits"],
            verbose=False,
        )
    assert made is not None
    made.save(str(path), external_data=False)


def compiled(model: nn.Module, pixels: Tensor, shapes: Any, path: Path, march: str) -> None:
    """Write a module as a package of AOTInductor. Raises UsageError where it cannot be exported."""
    with _exportable():
        program = torch.export.export(model, (pixels,), dynamic_shapes=shapes)
    # The number of threads is the user's at run time, not that of the machine that compiles.
    options: dict[str, Any] = {"cpp.dynamic_threads": True, "cpp.simdlen": _VECTORS[march]}
    options |= {"cpp.march": march}
    if compiler := os.environ.get("CXX"):
        options["cpp.cxx"] = (None, compiler)
    with _exportable():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )


class _exportable:
    """Makes any error of torch's exporters one line of the user's: they raise all kinds."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError):
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"the model cannot be exported: {said} (its forward must not branch on values; "
                "--to state_dict takes any model)"
            ) from None


def load(to: str, path: Path, model: Deployed) -> Run:
    """What a user of the file runs: a function of pixels to logits."""
    if to == "aoti":
        loaded: Run = torch._inductor.aoti_load_package(str(path))
        return loaded
    if to == "onnx":
        return _onnx(path)
    fresh = copy.deepcopy(model)
    for tensor in fresh.model.state_dict().values():
        tensor.zero_()  # so that nothing but the file's content can be right
    fresh.model.load_state_dict(torch.load(path, weights_only=True))
    return fresh


def _onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return lambda pixels: torch.from_numpy(session.run(None, {name: pixels.numpy()})[0])
