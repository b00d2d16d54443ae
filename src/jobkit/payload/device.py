"""The device of a rank and its machine: names and versions, memory, arithmetic, random numbers."""

import ctypes
import math
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from jobkit import gpus
from jobkit.paths import INSTALLED, REPOSITORY
from jobkit.payload.batches import sample_hash
from jobkit.payload.distributed import Group
from jobkit.program.process import host_name
from jobkit.spec.runspec import RunSpec

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
# Of cuBLAS, so that it adds in one order; and NCCL's ring, whose order follows from the ranks.
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


# --- the machine -------------------------------------------------------------------------------


def process_age_s() -> float:
    """Seconds since this process was started, the import of torch included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot - started_ticks / os.sysconf("SC_CLK_TCK")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        key = "hip" if torch.version.hip else "cuda"  # on AMD's GPUs NCCL is RCCL
        names[key] = str(torch.version.hip or torch.version.cuda)
        names["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return names


def gpu_state(device: torch.device) -> dict[str, str]:
    """Driver, clocks, power limit and ECC errors of the rank's GPU, as far as they are known."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return gpus.gpu_state(str(getattr(properties, "uuid", "")))


def git_commit() -> str | None:
    """The commit of the code, with '+changes' where files differ from it; None outside git."""
    if INSTALLED:  # a repository around it is somebody else's
        return None
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+changes"]
    command += ["--abbrev=40", "--exclude=*"]  # the whole hash, and no tag
    try:
        said = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)
        return said.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def start_fields(group: Group, threads: int) -> dict[str, Any]:
    """What ran where, with which versions: for the record run_start. Every rank calls."""
    place, device = group.place, group.device
    return {
        "world_size": place.world_size,
        "nodes": place.nodes,
        "node_list": ",".join(dict.fromkeys(group.gather(host_name(os.environ)))),
        "device": device_name(device),
        "device_type": device.type,
        "backend": group.backend,
        "versions": versions(device),
        "git_commit": git_commit() if place.rank == 0 else None,
        "job_id": place.job_id,
        "threads": threads,
    }


# --- memory ------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Have the process keep the memory that it frees, where its C library can do that.

    Each iteration frees and allocates the same large activations. By default glibc maps each of
    them again, and the page faults cost more than the augmentation does.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1):
            mallopt(_M_TOP_PAD, 64 * 2**20)


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """Peaks since the start in MiB, by the names of the epoch's record; NaN: not known."""
    allocated = reserved = used = math.nan
    # The kernel's high-water mark; getrusage's includes the parent's.
    mark = re.search(r"VmHWM:\s+([0-9]+)", Path("/proc/self/status").read_text())
    peak = mark[1] if mark else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = int(peak) / 1024
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device) / 2**20
        reserved = torch.cuda.max_memory_reserved(device) / 2**20
        with suppress(RuntimeError):  # some partitioned GPUs do not say
            # With CUDA's context and NCCL's buffers, unlike torch's. torch gives nothing back of
            # what it has reserved, so what is used after an epoch is what was used in it.
            free, total = torch.cuda.mem_get_info(device)
            used = (total - free) / 2**20
    return {
        "peak_memory_mib": allocated if device.type == "cuda" else resident,
        "allocated_memory_mib": allocated,
        "reserved_memory_mib": reserved,
        "device_memory_mib": used,
        "resident_memory_mib": resident,
    }


# --- arithmetic of a GPU -----------------------------------------------------------------------


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
    if fp32 == "auto":
        fp32 = "tf32" if fast else "ieee"
    return spec.with_values(precision=precision, fp32=fp32)


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
    """What the switches are, and cuDNN's version, beside versions(); nothing on the CPU."""
    if device.type != "cuda":
        return {}
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    # A model of the user's own may set them by either names; only the newer can then be read.
    parts = cudnn.conv, matmul  # type: ignore[attr-defined]
    tf32 = {part.fp32_precision == "tf32" for part in parts}
    return {
        "cudnn": str(cudnn.version()),
        "cudnn_benchmark": str(cudnn.benchmark).lower(),
        "fp32": "mixed" if len(tf32) > 1 else "tf32" if True in tf32 else "ieee",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        **{name.lower(): os.environ[name] for name in _SAME_BITS if name in os.environ},
    }


# --- random numbers, which dropout draws: each rank's own, and kept in checkpoints ---------------


def seed_rank(seed: int, rank: int, iteration: int = 0) -> None:
    """Begin numbers that differ between ranks.

    All ranks have seeded alike to make the same weights; with equal masks of dropout they would be
    one draw, not as many as there are ranks. Rank 0 draws as a run on one rank does, unless an
    iteration is given: a run resumed at another size must not draw again what its first
    iterations drew. The order of the samples and their augmentation draw nothing here.
    """
    if rank or iteration:  # mixed: a sum would give rank 1 what rank 0 has in the next repeat
        torch.manual_seed(int(sample_hash(seed, iteration, torch.tensor([rank]))))
