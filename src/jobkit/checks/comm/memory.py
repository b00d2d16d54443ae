"""How much memory a rank may still take."""

from pathlib import Path

import torch


def free_bytes(device: torch.device, ranks: int) -> int:
    """Return the free memory of the GPU, or on the CPU an even share for each rank of the node.

    The limit of a job or a container (its cgroup) is not read.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // ranks
    return 2**62  # an old kernel does not say
