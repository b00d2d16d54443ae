"""How a GPU computes: fp32 or TF32, and the same bits each time. The CPU has neither choice."""

import os
from collections.abc import MutableMapping
from dataclasses import replace

import torch

from jobkit.payload.distributed import Group
from jobkit.spec.runspec import RunSpec

# Of cuBLAS, so that it adds in one order; and NCCL's ring, whose order follows from the ranks.
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def set_environment(spec: RunSpec, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the libraries read when they are first used; call it before anything of CUDA."""
    if spec.deterministic and spec.device != "cpu":
        for name, value in _SAME_BITS.items():
            environ.setdefault(name, value)


def resolved(spec: RunSpec, group: Group) -> RunSpec:
    """The settings with what they leave to the device decided: the same on every rank.

    On GPUs what is fast, unless the run is to be deterministic; on the CPU fp32. Every rank calls.
    """
    fast = group.device.type == "cuda" and not spec.deterministic
    precision, fp32 = spec.precision, spec.fp32
    if precision == "auto":
        low = fast and all(group.gather(torch.cuda.is_bf16_supported(including_emulation=False)))
        precision = "bf16" if low else "fp32"
    return replace(
        spec,
        precision=precision,
        fp32=("tf32" if fast else "ieee") if fp32 == "auto" else fp32,
    )


def configure(spec: RunSpec, device: torch.device) -> None:
    """Set every switch of a GPU's arithmetic, whatever torch or the environment has it at."""
    if device.type != "cuda":
        return
    # Left alone, torch has convolutions in TF32 and matrix products in fp32, unless a variable
    # that vendors' images may set says otherwise.
    torch.backends.cudnn.allow_tf32 = spec.fp32 == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = spec.fp32 == "tf32"
    torch.backends.cudnn.benchmark = not spec.deterministic
    torch.backends.cudnn.deterministic = spec.deterministic
    torch.use_deterministic_algorithms(spec.deterministic)


def recorded(device: torch.device) -> dict[str, str]:
    """What the switches are, and cuDNN's version, beside host.versions; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    found = {
        "cudnn": str(torch.backends.cudnn.version()),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark).lower(),
        "fp32": {(True, True): "tf32", (False, False): "ieee"}.get((cudnn, matmul), "mixed"),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }
    return found | {name.lower(): os.environ[name] for name in _SAME_BITS if name in os.environ}
