"""Whether a process that a file names is still there: by pid and start, on this machine."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_start(pid: int) -> int | None:
    """When a process began, in ticks since the boot; None where it is gone, or ended (a zombie).

    Together with the pid it names a process for good: a pid alone is given out again.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = words.rpartition(")")[2].split()  # the name may hold spaces and parentheses
    return int(after_name[19]) if after_name[0] not in "ZX" else None


def age_s(record: Mapping[str, Any]) -> float | None:
    """Seconds since the start of the process of this machine that a record names, by no clock
    that can be set; None where it has ended, or is of another machine.
    """
    start = record.get("pid_start")
    if type(start) is not int or not is_alive(record) or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")


def is_alive(record: Mapping[str, Any] | None) -> bool | None:
    """Whether the process that job.json or launcher.json names is alive.

    None: it cannot be told from this machine.
    """
    pid = (record or {}).get("pid")
    if not record or type(pid) is not int or pid <= 0:
        return None if record else False
    if record.get("host") not in (None, socket.gethostname()):
        return None
    if not Path("/proc/self/stat").exists():
        return _answers(pid)
    start = process_start(pid)
    return start is not None and record.get("pid_start") in (None, start)


def _answers(pid: int) -> bool:
    """Whether a process of this number exists, on a system that has no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
