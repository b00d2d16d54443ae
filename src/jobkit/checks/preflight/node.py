"""What a process finds out about its node's GPUs, network and limits: plain data, no judgement."""

import contextlib
import re
import resource
import shutil
from pathlib import Path
from typing import Any

_FILES, _LOCKED = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
_SYS = Path("/sys/class")


def read_line(path: Path) -> str:
    """Return the text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nics(root: Path = _SYS) -> dict[str, float]:
    """Return the rate in Gb/s of each active interface made for RDMA, by name.

    InfiniBand, RoCE and EFA: ABI/stable/sysfs-class-infiniband of the kernel; Slingshot: hsn*.
    """
    found = {}
    for port in sorted(root.glob("infiniband/*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", read_line(port / "rate"))
        if rate and "ACTIVE" in read_line(port / "state"):
            found[f"{port.parent.parent.name}:{port.name}"] = float(rate[1])
    for path in sorted(root.glob("net/hsn*")):
        speed = read_line(path / "speed")  # in Mb/s
        if speed.isdigit():
            found[path.name] = int(speed) / 1000
    return found


def limits() -> dict[str, Any]:
    """Return the process's limits that many ranks, shared memory and RDMA run into."""
    unlimited = resource.RLIM_INFINITY
    files, locked = (resource.getrlimit(one)[0] for one in (_FILES, _LOCKED))
    shm_mib = -1
    with contextlib.suppress(OSError):
        shm_mib = shutil.disk_usage("/dev/shm").free // 2**20
    return {
        "open_files": -1 if files == unlimited else files,
        "memlock_mib": -1 if locked == unlimited else locked // 2**20,
        "shm_mib": shm_mib,
        "nics": nics(),
    }
