"""What a run leaves behind: records, human lines, and the outcome that run.sh reads."""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.metric import MetricWriter
from jobkit.paths import RunPaths, write_whole
from jobkit.spec import RunSpec


class Reporter:
    """Records and lines from rank 0; nothing from the other ranks. Without a folder, lines only."""

    def __init__(self, paths: RunPaths | None, attempt: int, rank: int) -> None:
        self._chief = rank == 0
        self._writer: MetricWriter | None = None
        if paths and self._chief:
            self._writer = MetricWriter(
                study=paths.folder.parent.name,
                run_id=paths.folder.name,
                attempt=attempt,
                rank=rank,
                path=paths.metrics(attempt),
                log=sys.stdout,
            )

    def say(self, line: str) -> None:
        """Print a line for people."""
        if self._chief:
            print(line, flush=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Write a record for programs."""
        if self._writer:
            self._writer.write(kind, **fields)

    def warn(self, text: str) -> None:
        """Say what the report must show, to people and to programs."""
        self.say(f"warning: {text}")
        self.record("message", level="warning", text=text)


def write_spec(paths: RunPaths, spec: RunSpec, rank: int) -> None:
    """Leave the whole spec in the run's folder (rank 0), unless the launcher did so already.

    Raises UsageError, on every rank, where the folder was made for another run.
    """
    if paths.spec.exists():
        _compare(paths.spec, spec)
    elif rank == 0:
        content = {
            "v": 1,
            "study": paths.folder.parent.name,
            "run_id": paths.folder.name,
            "spec": spec.to_dict(),
        }
        write_whole(paths.spec, json.dumps(content, indent=1) + "\n")


def _compare(path: Path, spec: RunSpec) -> None:
    """Raise UsageError where a spec.json says anything but this spec."""
    planned, own = json.loads(path.read_text(encoding="utf-8"))["spec"], spec.to_dict()
    for name in own:
        if name != "data_dir" and planned.get(name) != own[name]:
            raise UsageError(
                f"{path.parent} was made for another run: {name} is {planned.get(name)!r} there "
                f"and {own[name]!r} here; choose another --run-dir"
            )


def write_outcome(
    paths: RunPaths | None, attempt: int, status: str, exit_code: int, reason: str = ""
) -> None:
    """Leave how the attempt ended. The first of its ranks to say so is right: causes are first."""
    if paths is None:
        return
    path = paths.outcome(attempt)
    # exit_code is first, where run.sh looks for it.
    content = {
        "exit_code": exit_code,
        "status": status,
        "reason": reason[:2000],
        "run_id": paths.folder.name,
        "attempt": attempt,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # another rank was first
        os.link(beside, path)
    beside.unlink()
