"""Runs code on hostile files in a child process, and reports what it did."""

import contextlib
import io
import json
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_MIB = 300, 512
SECRET = "s3cr3t-token-of-the-environment"
_QUERIES = ("squeue", "sacct", "nvidia-smi", "amd-smi", "rocm-smi")  # a look may start these


@dataclass
class Done:
    """What a child did: it must have ended by itself, in time and memory, without a traceback."""

    code: object = None
    error: str = ""
    out: str = ""
    mib: float = 0.0  # at most, beside what it had at its start
    started: list[str] = field(default_factory=list)  # programs
    signalled: list[str] = field(default_factory=list)  # processes

    @property
    def faults(self) -> list[str]:
        found = [self.error] if self.error else []
        found += [f"{self.mib:.0f} MiB"] if self.mib > LIMIT_MIB else []
        found += [f"started {name}" for name in self.started if name not in _QUERIES]
        found += [f"signalled {pid}" for pid in self.signalled]
        return found + [f"printed {line!r}" for line in self.out.split("\n") if not plain(line)]


def plain(line: str) -> bool:
    """Whether a line holds nothing that controls a terminal."""
    return not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in line)


def in_child(act: Callable[[], object], uid: int | None = None) -> Done:
    """Call a function in a forked process with a limit of time; its exit code is what it gives.

    uid: as this user, with the group of the same number.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        signal.alarm(LIMIT_S)  # which kills it
        with contextlib.suppress(BaseException):
            os.write(writes, json.dumps(vars(_watched(act))).encode("utf-8", "replace"))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as stream:
        content = stream.read()
    os.waitpid(pid, 0)
    if not content:
        return Done(error=f"it did not end within {LIMIT_S} s, or crashed")
    return Done(**json.loads(content))


def _watched(act: Callable[[], object]) -> Done:
    """Call a function and note what it starts, whom it signals, what it prints and takes."""
    done, said = Done(), io.StringIO()
    _watch(done)
    base = _status_mib("VmRSS")
    with contextlib.suppress(PermissionError):  # of a process that changed its user
        # From here on the peak is this function's.
        Path("/proc/self/clear_refs").write_text("5")
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            done.code = act()
    except SystemExit as stop:
        done.code = stop.code
    except BaseException:
        done.error = traceback.format_exc()[-3000:]
    done.out, done.mib = said.getvalue()[-20_000:], _status_mib("VmHWM") - base
    if not isinstance(done.code, int | str | None):
        done.code = repr(done.code)[:200]
    return done


def _watch(done: Done) -> None:
    """Replace what starts and signals processes by functions that note it."""

    def popen(self: Any, words: Any, *_: Any, **__: Any) -> None:
        done.started.append(words if isinstance(words, str) else str(words[0]))
        raise FileNotFoundError(2, "not started")

    def kill(pid: Any, number: int, *_: Any) -> None:
        if number:
            done.signalled.append(str(pid))

    subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
    os.kill = os.killpg = signal.pidfd_send_signal = kill  # type: ignore[assignment]
    os.system = os.popen = lambda words: done.started.append(words)  # type: ignore[assignment]


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def snapshot(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found
