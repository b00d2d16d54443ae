"""How much memory a rank may still take."""

from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, ranks: int) -> int:
    """Free memory of the GPU; on the CPU an even share for each of a node's ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_of_machine(), *_free_of_cgroups()) // ranks


def _free_of_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62  # an old kernel does not say


def _free_of_cgroups() -> list[int]:
    """What each group of this process leaves it: a container or a job may have less than all."""
    found = [2**62]
    try:
        own = Path("/proc/self/cgroup").read_text().rsplit("::", 1)[-1].strip().lstrip("/")
    except OSError:
        return found
    folder = _CGROUPS / own
    for place in (folder, *folder.parents):
        if not place.is_relative_to(_CGROUPS):
            break
        found += _left(place / "memory.max", place / "memory.current")  # version 2
    return found + _left(
        _CGROUPS / "memory/memory.limit_in_bytes", _CGROUPS / "memory/memory.usage_in_bytes"
    )


def _left(limit: Path, usage: Path) -> list[int]:
    """Limit less usage in bytes; nothing where there is no limit."""
    try:
        return [max(0, int(limit.read_text()) - int(usage.read_text()))]
    except (OSError, ValueError):  # no such file, or the word "max"
        return []
