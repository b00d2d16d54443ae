"""A place where a drill runs: this machine (run.sh and torchrun)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from jobkit.launch.command import clean_environment, local_command, python_path
from jobkit.launch.slurm_options import Options
from jobkit.paths import RunPaths
from jobkit.spec.runspec import PlannedRun

Size = dict[str, int]  # nodes, and ranks_per_node
MARK = "JOBKIT_DRILL"  # in the environment of all that a drill starts


def marked(mark: str) -> list[int]:
    """The processes on this machine that carry the mark in their environment."""
    found, text = [], f"{MARK}={mark}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def none_left(mark: str, within_s: float) -> int:
    """Wait until no process with the mark is left; return the number left after the time."""
    deadline = time.monotonic() + within_s
    while (left := len(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def end_marked(mark: str) -> None:
    """Kill every process with the mark."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_ranks(mark: str, number: int, rank: int | None = None) -> int:
    """Signal the processes of one rank, or of all, on this machine; return how many they were.

    A rank's processes are known by RANK. The shell that starts a command as a rank is none of them.
    """
    count = 0
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            variables = (folder / "environ").read_bytes().split(b"\0")
            own = [v for v in variables if v.startswith(b"RANK=")]
            wanted = own if rank is None else [v for v in own if v == b"RANK=%d" % rank]
            if wanted and b"rank_run" not in (folder / "cmdline").read_bytes():
                os.kill(pid, number)
                count += 1
    return count


@dataclass(kw_only=True)
class Started:
    """One start of a run, which run.sh or Slurm may restart.

    begins, ends: when its attempts were seen to begin and to end, in Unix seconds.
    """

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    over: bool = False
    said: str = ""  # how it ended, in the launcher's words

    @property
    def took_s(self) -> float:
        """Seconds of its longest attempt, without the time in a queue."""
        pairs = zip(self.begins, self.ends, strict=False)
        return max((end - begin for begin, end in pairs), default=0.0)

    def look(self) -> bool:
        """Update what is known of the start; return whether it is still in progress."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End it."""
        raise NotImplementedError


@dataclass(kw_only=True)
class LocalStart(Started):
    """A run.sh on this machine."""

    process: "subprocess.Popen[bytes]"
    paths: RunPaths
    before: int  # attempts that others have begun

    def look(self) -> bool:
        now, ended = time.time(), self.process.poll() is not None
        for _ in range(len(self.paths.attempt_numbers()) - self.before - len(self.begins)):
            if self.begins:
                self.ends.append(now)
            self.begins.append(now)
        if ended and not self.over:
            self.over, self.said = True, f"ended with exit code {self.process.returncode}"
            self.ends.append(now)
        return not self.over

    def cancel(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


class LocalPlace:
    """This machine, without Slurm."""

    name, poll_s = "here", 0.1
    sees_processes = True
    size: ClassVar[Size] = {"nodes": 1, "ranks_per_node": 2}

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], again: bool, more: Options
    ) -> Started:
        """Start the run; again: run.sh restarts it once."""
        words = local_command(spec, paths.folder, ["--max-restarts", "1"] if again else [])
        before = len(paths.attempt_numbers())
        with paths.log.open("ab") as log:
            process = subprocess.Popen(
                words,
                env={**clean_environment(os.environ), "JOBKIT_PYTHON": sys.executable, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the drill's to answer
            )
        return LocalStart(process=process, paths=paths, before=before)

    def warn(self, started: Started) -> None:
        """Send the stop signal to run.sh."""
        assert isinstance(started, LocalStart)
        started.process.send_signal(signal.SIGUSR2)

    def terminate_ranks(self, started: Started, mark: str) -> None:
        """Send SIGTERM to the ranks only."""
        signal_ranks(mark, signal.SIGTERM)


def compare(reference: Path, runs: list[Path]) -> dict[str, bool | None]:
    """Return, by folder, whether each run's parameters equal the reference's; None: unknown."""
    words = [sys.executable, "-m", "jobkit.checks.compare", str(reference), *map(str, runs)]
    env = {**clean_environment(os.environ), "PYTHONPATH": python_path()}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["run"]: one["same"] for one in said}
