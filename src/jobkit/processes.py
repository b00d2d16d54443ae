"""Whether a process that a file names is still there, and its end: by pid and start."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.25


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


def pid_namespace() -> str | None:
    """The name of the set of processes that this one sees; a container may have one of its own.

    None where the kernel does not say.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def end_process(pid: int, is_ours: Callable[[int, list[bytes]], bool]) -> bool:
    """Send TERM to a process of this user's and wait for its end; False, and no signal, if it is
    gone or another's, or is_ours(its start in ticks since the boot, its command line) is not true.

    Raises OSError on a kernel before Linux 5.3, where a pid could become another process's
    before the signal.
    """
    try:
        handle = os.pidfd_open(pid)  # from here on the pid cannot become another process's
    except ProcessLookupError:
        return False
    try:
        folder, start = Path(f"/proc/{pid}"), process_start(pid)
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if start is None or folder.stat().st_uid != os.geteuid() or not is_ours(start, words):
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
    while process_start(pid) == start:
        time.sleep(_POLL_S)
    return True


def since_boot_s(start: int) -> float:
    """Seconds since a start in ticks since the boot, by a clock that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")


def age_s(record: Mapping[str, Any]) -> float | None:
    """Seconds since the start of the process of this machine that a record names, by no clock
    that can be set; None where it has ended, or is of another machine.
    """
    start = record.get("pid_start")
    if type(start) is not int or not is_alive(record) or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return since_boot_s(start)


def is_alive(record: Mapping[str, Any] | None) -> bool | None:
    """Whether the process that job.json or launcher.json names is alive.

    None: it cannot be told from this machine.
    """
    pid = (record or {}).get("pid")
    if not record or type(pid) is not int or pid <= 0:
        return None if record else False
    if record.get("host") not in (None, socket.gethostname()):
        return None
    if record.get("pid_ns") not in (None, pid_namespace()):  # a container may have the host's name
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


def is_at_work(job: Mapping[str, Any]) -> bool | None:
    """Whether a start that job.json tells of is alive: who runs it, or what that one started.

    None: it cannot be told from this machine.
    """
    child = job.get("child")
    known = is_alive(job)
    if known is False and isinstance(child, Mapping):
        return is_alive({**job, **child})
    return known
