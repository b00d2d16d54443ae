"""Processes: which one a file names, what one has started, and children that end together.

Standard library of Python 3.10.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_POLL_S = 0.25
_LAST_LINES_S = 2.0  # for what a child has printed last
_WRITING = threading.Lock()
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# --- which process a file names: by pid and start -------------------------------------------------


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


def pid_namespace() -> str:
    """The name of the set of processes that this one sees; a container may have one of its own."""
    return str(Path("/proc/self/ns/pid").readlink())


def identify(pid: int) -> dict[str, Any]:
    """What a file records of a process of this machine, for is_alive()."""
    of_machine = {"pid_ns": pid_namespace(), "host": socket.gethostname()}
    return {"pid": pid, "pid_start": process_start(pid), **of_machine}


def is_alive(record: Mapping[str, Any] | None) -> bool | None:
    """Whether the process that job.json or launcher.json names is alive.

    None: it cannot be told from this machine.
    """
    if not record:
        return False
    if type(pid := record.get("pid")) is not int or pid <= 0:
        return None
    if record.get("host") not in (None, socket.gethostname()):
        return None
    if record.get("pid_ns") not in (None, pid_namespace()):  # a container may have the host's name
        return None
    start = process_start(pid)
    return start is not None and record.get("pid_start") in (None, start)


def is_at_work(job: Mapping[str, Any]) -> bool | None:
    """Whether a start that job.json tells of is alive: who runs it, or what that one started.

    None: it cannot be told from this machine.
    """
    known, child = is_alive(job), job.get("child")
    return is_alive({**job, **child}) if known is False and isinstance(child, Mapping) else known


def end_process(pid: int, start: int | None, last_words: list[bytes]) -> bool:
    """Send TERM to a process of this user's that began then, and whose command line ends with
    these words; wait for its end. False, and no signal, where there is none.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        # Whoever wrote a file must not choose who is signalled.
        is_own = Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
        is_known = is_own and start is not None and start == process_start(pid)
        if not is_known or words[-len(last_words) :] != last_words:
            return False
        os.kill(pid, signal.SIGTERM)
    except OSError:
        return False
    while process_start(pid) == start:
        time.sleep(_POLL_S)
    return True


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """The pid and the variables of each process of this machine that this user may look at."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = os.fsdecode((folder / "environ").read_bytes())
        except OSError:  # it has ended, or is another user's
            continue
        pairs = (entry.partition("=") for entry in text.split("\0"))
        yield int(folder.name), {name: value for name, _, value in pairs}


# --- what a process has started -------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """The pids of a process's children."""
    pids: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            pids += [int(word) for word in tasks.read_text().split()]
    return pids


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; of one that has just ended, no."""
    with contextlib.suppress(OSError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)
    return False


def descendants(pid: int) -> list[int]:
    """The pids of all that a process has started, and of what these have."""
    below = children_of(pid)
    return [*below, *(pid for child in below for pid in descendants(child))]


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends (Linux's subreaper).

    torchrun starts each rank in a session of its own, which no signal to a group would reach.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def end_descendants(grace_s: float) -> None:
    """End all descendants of this process: TERM, then, after the grace period, KILL.

    Every child that Popen started must have been waited for.
    """
    deadline, signalled = time.monotonic() + grace_s, set[int]()
    while pids := descendants(os.getpid()):
        late = time.monotonic() > deadline
        for pid in pids:
            if late or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


# --- children that end together -------------------------------------------------------------------


class Signals:
    """The signals that came to this process, in order; the end of a child ends a wait as well."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in (*END_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves HUP
                signal.signal(signum, lambda *_: None)  # SIG_IGN would be inherited by the children

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for a signal or for the end of a child, but no longer; return the signals."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return []
        return [number for number in os.read(self._read, 4096) if number != signal.SIGCHLD]


class Children:
    """Processes that were started here. Where one fails the others are ended: TERM, then KILL."""

    def __init__(self, grace_s: float) -> None:
        """grace_s: from TERM to KILL."""
        self.grace_s = grace_s
        self.processes = list[subprocess.Popen[bytes]]()
        self.failed = 0  # the exit code of the first one that failed
        self._copiers = list[threading.Thread]()
        self._groups = set[int]()
        self._deadline: float | None = None

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        whole_lines: bool = False,
        session: bool = True,
        output: IO[bytes] | None = None,
    ) -> int:
        """Start one; return its pid. Raises OSError where the program cannot be started.

        whole_lines: others print to the same output, so each line is written in one piece.
        session: it gets one of its own; a signal to it reaches all that it has started.
        """
        pipe = subprocess.PIPE if whole_lines else output
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            start_new_session=session, bufsize=0,
        )  # fmt: skip
        self.processes.append(process)
        if session:
            self._groups.add(process.pid)
        for source, target in ((process.stdout, 1), (process.stderr, 2)):
            if source is not None:
                copier = threading.Thread(target=_copy_lines, args=(source, target), daemon=True)
                copier.start()
                self._copiers.append(copier)
        return process.pid

    def send(self, signum: int) -> None:
        """Send a signal to each child that has not ended."""
        for process in self.processes:
            process.send_signal(signum)

    def end(self) -> None:
        """Ask every child to end; poll() kills what is left after the grace period."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace_s
            self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every child, with all of its session where it has one."""
        for process in self.processes:
            process.kill()
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def codes(self) -> list[int | None]:
        """The exit code of each child, as a shell has it; None while it runs."""
        codes = [process.poll() for process in self.processes]
        return [128 - code if code is not None and code < 0 else code for code in codes]

    def poll(self) -> bool:
        """Look at all of them; whether all have ended, and nothing of their sessions is left."""
        codes = self.codes()
        for code in filter(None, codes):
            if not self.failed:
                self.failed = code
                self.end()
        if None not in codes:
            self.kill()
            for copier in self._copiers:  # ends with the last process that has the pipe
                copier.join(_LAST_LINES_S)
            return True
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()
        return False


def _copy_lines(source: IO[bytes], target: int) -> None:
    """Copy whole lines, as srun does: each in one write, so that no other rank's comes between."""
    rest = b""
    while block := source.read(1 << 16):
        rest += block
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1  # a progress bar ends with the second
        if end:
            _write(target, rest[:end])
            rest = rest[end:]
    _write(target, rest + b"\n" if rest else b"")


def _write(target: int, data: bytes) -> None:
    with _WRITING, contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(target, data) :]
