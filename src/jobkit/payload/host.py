"""The process and its machine: cores, memory, age, versions."""

import contextlib
import ctypes
import gc
import os
import platform
import resource
import subprocess
import time
from typing import NamedTuple

import torch

from jobkit import gpus
from jobkit.paths import INSTALLED, REPOSITORY

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Have the process keep the memory that it frees; return whether that is possible.

    Each iteration frees and allocates the same large activations. By default glibc maps each of
    them again, and the page faults cost more than the augmentation does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_MAX, 0)
        and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        and mallopt(_M_TOP_PAD, 64 * 2**20)
    )


def process_age_s() -> float:
    """Seconds since this process was started, the import of torch included."""
    with open("/proc/self/stat") as file:  # noqa: PTH123 - a file of the kernel's
        started_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot - started_ticks / os.sysconf("SC_CLK_TCK")


class PeakMemory(NamedTuple):
    """Peaks since the start in MiB: allocated and reserved on the GPU (NaN without), resident.

    device: what the driver says is used of the GPU, by whom ever, when it was asked; NaN where it
    does not say.
    """

    allocated: float
    reserved: float
    resident: float
    device: float = float("nan")


def peak_memory_mib(device: torch.device) -> PeakMemory:
    """The process's peaks of memory so far."""
    resident = _peak_resident_mib()
    if device.type != "cuda":
        return PeakMemory(float("nan"), float("nan"), resident)
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return PeakMemory(allocated / 2**20, reserved / 2**20, resident, _used_on_device_mib(device))


def _used_on_device_mib(device: torch.device) -> float:
    """Memory of the GPU that is not free: with CUDA's context and NCCL's buffers, unlike torch's.

    torch gives nothing back of what it has reserved, so what is used after an epoch is what was
    used in it. NaN where the driver does not say, as of some partitioned GPUs.
    """
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return float("nan")
    return (total - free) / 2**20


def _peak_resident_mib() -> float:
    """The kernel's high-water mark of the resident set; getrusage's includes the parent's."""
    try:
        with open("/proc/self/status") as file:  # noqa: PTH123 - a file of the kernel's
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peaks of memory, after freed memory was returned to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError, AttributeError):  # another C library; no such file
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - a file of the kernel's
            file.write("5")  # the high-water mark of the resident set


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123 - a file of the kernel's
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        key = "hip" if torch.version.hip else "cuda"  # on AMD's GPUs NCCL is RCCL
        found[key] = str(torch.version.hip or torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def gpu_state(device: torch.device) -> dict[str, str]:
    """Driver, clocks, power limit and ECC errors of the rank's GPU, as far as they are known."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return gpus.gpu_state(str(getattr(found, "uuid", "")))


def git_commit() -> str | None:
    """The commit of the code, with '+changes' where files differ from it; None outside git."""
    if INSTALLED:  # a repository around it is somebody else's
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
