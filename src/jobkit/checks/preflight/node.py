"""What a process finds out about its node's GPUs, network and limits: plain data, no judgement."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILES, _LOCKED = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
_SYS, _PROC = Path("/sys/class"), Path("/proc")
# Variables of a shell or a batch script that bind every rank alike.
_BINDINGS: tuple[str, ...] = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_BINDINGS += ("SLURM_CPU_BIND", "SLURM_GPU_BIND")


def read_line(path: Path) -> str:
    """Return the text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gpu_errors() -> str:
    """Return how many Xid errors of NVIDIA's driver the kernel's log has, and the last; or empty.

    Empty also where users may not read that log.
    """
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=4)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [x for x in done.stdout.decode(errors="replace").splitlines() if "NVRM: Xid" in x]
    if not lines:
        return ""
    return f"{len(lines)} Xid, the last: {lines[-1][lines[-1].index('NVRM: Xid') :][:200]}"


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


def bindings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind a process to cores or GPUs."""
    return {name: environ[name][:200] for name in _BINDINGS if environ.get(name)}


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
        "bindings": bindings(os.environ),
    }


def core_waits(root: Path = _PROC) -> tuple[float, float]:
    """Return the time, and for how many seconds until then a process of the node waited for a core.

    The second is 0 where the kernel does not count it (Documentation/accounting/psi.rst).
    """
    found = re.search(r"some .*total=(\d+)", read_line(root / "pressure/cpu"))
    return time.monotonic(), int(found[1]) / 1e6 if found else 0.0


def busy_since(before: tuple[float, float], root: Path = _PROC) -> dict[str, float]:
    """Return the node's load, and the share of the time since in which a process waited for a core.

    The load is the kernel's average of a minute: processes that run or wait to run. Both are 0
    where they are not known.
    """
    now = core_waits(root)
    words = read_line(root / "loadavg").split()
    share = (now[1] - before[1]) / max(now[0] - before[0], 1e-3)
    return {"load": float(words[0]) if words else 0.0, "core_wait_share": min(max(share, 0.0), 1.0)}
