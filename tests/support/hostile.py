"""Runs code on hostile files in a child process, and reports what it did."""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LIMIT_S, LIMIT_BYTES = 300, 4 << 30
SECRET = "s3cr3t-token-of-the-environment"
_QUERIES = ("squeue", "sacct", "nvidia-smi", "amd-smi", "rocm-smi")  # a look may start these


@dataclass
class Done:
    """What a child did: it must have ended by itself, in time and memory, without a traceback."""

    code: object = None
    error: str = ""
    out: str = ""
    started: list[str] = field(default_factory=list)  # programs; and "signal to PID"

    @property
    def faults(self) -> list[str]:
        found = [self.error] if self.error else []
        found += [f"started {name}" for name in self.started if name not in _QUERIES]
        return found + [f"printed {line!r}" for line in self.out.split("\n") if not plain(line)]


def plain(line: str) -> bool:
    """Whether a line holds nothing that controls a terminal."""
    return not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in line)


def in_child(act: Callable[[], object], uid: int | None = None) -> Done:
    """Call a function in a forked process, within limits; its exit code is what it gives.

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
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        with contextlib.suppress(BaseException):
            os.write(writes, json.dumps(vars(_watched(act))).encode("utf-8", "replace"))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as stream:
        content = stream.read()
    os.waitpid(pid, 0)
    return Done(**json.loads(content)) if content else Done(error="it did not end, or crashed")


def _watched(act: Callable[[], object]) -> Done:
    """Call a function and note what it starts, whom it signals and what it prints."""
    done, said = Done(), io.StringIO()

    def popen(self: Any, words: Any, *_: Any, **__: Any) -> None:
        done.started.append(words if isinstance(words, str) else str(words[0]))
        raise FileNotFoundError(2, "not started")

    def kill(pid: Any, number: int, *_: Any) -> None:
        if number:
            done.started.append(f"signal to {pid}")

    subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
    os.kill = os.killpg = signal.pidfd_send_signal = kill  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            done.code = act()
    except SystemExit as stop:
        done.code = stop.code
    except BaseException:
        done.error = traceback.format_exc()[-3000:]
    done.out = said.getvalue()[-20_000:]
    if not isinstance(done.code, int | str | None):
        done.code = repr(done.code)[:200]
    return done
