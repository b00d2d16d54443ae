"""The GPUs of this machine without torch, by vendor: `python -m jobkit.gpus` prints how many.

The one table of what differs between NVIDIA (CUDA) and AMD (ROCm): the commands that list GPUs, the
variables that choose among them, and the option of a container.
"""

import itertools
import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.paths import cache_root

_AMD_DRIVER, _AMD_DEVICE = Path("/sys/module/amdgpu/version"), Path("/dev/kfd")


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """What differs between the makers of GPUs."""

    listings: tuple[tuple[str, ...], ...]  # commands, the first that is there counts
    listed: str  # a line of theirs for each GPU
    visible: tuple[str, ...]  # variables that choose among them
    none: str  # the value of the first of these that chooses none
    apptainer: str  # the option that shows the GPUs inside


VENDORS = {
    "nvidia": Vendor(
        listings=(("nvidia-smi", "--list-gpus"),),
        listed=r"(GPU \d+):|\s+(MIG) ",
        visible=("CUDA_VISIBLE_DEVICES",),
        none="",
        apptainer="--nv",
    ),
    "amd": Vendor(
        listings=(("amd-smi", "list"), ("rocm-smi", "--showid")),
        listed=r"(GPU: \d+)|(GPU\[\d+\])",
        visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        none="-1",
        apptainer="--rocm",
    ),
}


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs a process started here would see."""
    for vendor in VENDORS.values():
        # The first of its commands that is there and works.
        lines = next(filter(None, (_printed(*command) for command in vendor.listings)), [])
        matches = (re.match(vendor.listed, line) for line in lines)
        if names := {match[1] or match[2] for match in matches if match}:
            # CUDA shows a process one instance only of GPUs that are partitioned (MIG).
            count = 1 if "MIG" in names else len(names)
            return min(count, *(_chosen(environ.get(name), count) for name in vendor.visible))
    return 0


def _chosen(text: str | None, count: int) -> int:
    """How many of the GPUs a variable such as CUDA_VISIBLE_DEVICES chooses; None: all."""
    if text is None:
        return count
    # What is after an invalid entry, such as -1, does not count.
    words = (re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word.strip()) for word in text.split(","))
    chosen = len([*itertools.takewhile(bool, words)])
    return min(chosen, 1) if "MIG-" in text else chosen


def hide_gpus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let this process and its children see no GPU; to be called before torch is imported.

    torch synchronises and copies by way of a GPU that it sees, even in a run on the CPU: a hook of
    DDP fails then, and a context on GPU 0 takes memory from its owner.
    """
    for vendor in VENDORS.values():
        environ[vendor.visible[0]] = vendor.none


_QUERY = {
    "driver": "driver_version",
    "gpu_max_clock": "clocks.max.sm",
    "gpu_power_limit": "power.limit",
    "gpu_ecc_errors": "ecc.errors.uncorrected.volatile.total",
}


def gpu_state(uuid: str) -> dict[str, str]:
    """Return driver, clocks, power limit and ECC errors of a GPU; what is unknown is left out.

    Two runs on the same model of GPU differ by these. uuid: as torch or nvidia-smi writes it; of an
    empty one, as where torch cannot use the GPU, it is the first GPU that is visible. Of
    AMD's GPUs the driver's version is known.
    """
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    query = f"--query-gpu={','.join(_QUERY.values())}"
    lines = _printed("nvidia-smi", query, "--format=csv,noheader", *(["-i", name] if uuid else []))
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if len(values) == len(_QUERY):
        return {key: v for key, v in zip(_QUERY, values, strict=True) if v and v[0] != "["}
    if _AMD_DRIVER.exists():  # which a processor with graphics has as well
        return {"driver": _AMD_DRIVER.read_text().strip()}
    return {}


def _printed(*command: str) -> list[str]:
    """The lines that a command prints; none where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def prepare_rocm(local_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """On a node with AMD's driver set what MIOpen needs, before torch is imported.

    Its databases are files that all ranks of a user would lock in a shared home; and without the
    other variable it transposes channels-last tensors for each convolution.
    """
    if not _AMD_DEVICE.exists():
        return
    folder = str(cache_root() / "jobkit" / "miopen" / f"{os.uname().nodename}-{local_rank}")
    for name in ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"):
        environ.setdefault(name, folder)
    environ.setdefault("PYTORCH_MIOPEN_SUGGEST_NHWC", "1")


if __name__ == "__main__":  # of hpc/gpu-check.sh
    print(count_gpus())
