"""What a run writes: records, lines for people, rank logs, and the outcome for run.sh."""

import contextlib
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any, TextIO

from jobkit.errors import UsageError
from jobkit.files import append_to
from jobkit.paths import RunPaths, read_json, write_json
from jobkit.program.lines import Writer
from jobkit.spec.runspec import OF_IDENTITY


class Reporter:
    """Writes records and lines (rank 0) and a log per rank. Without a folder, lines only."""

    def __init__(self, paths: RunPaths | None, attempt: int, rank: int) -> None:
        self._rank, self._attempt, self._paths = rank, attempt, paths
        self.folder = paths.folder if paths else None  # of the run
        self.stream: TextIO = sys.stderr  # where this rank's own lines go
        self.writer: Writer | None = None  # of the run's records; None on ranks above 0
        self.startup: dict[str, float] = {}  # seconds of its parts
        if paths:
            self._open = partial(
                Writer,
                study=paths.folder.parent.name,
                run_id=paths.folder.name,
                attempt=attempt,
                rank=rank,
            )
            try:
                path = paths.rank_log(attempt, rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                raw = io.BufferedWriter(append_to(path))
                self.stream = io.TextIOWrapper(
                    raw, "utf-8", "backslashreplace", line_buffering=True
                )
                if rank == 0:
                    self.writer = self._open(path=paths.metrics(attempt), log=sys.stdout)
            except OSError as error:
                raise UsageError(f"{paths.folder} is not writable: {error.strerror}") from None

    def rank_writer(self, what: str) -> Writer | None:
        """A writer of this rank's own records; None without a folder.

        what: windows of ranks above 0 (r), samples of the machine (s), causes (w).
        """
        if self._paths is None:
            return None
        path = self._paths.metrics_of_rank(self._attempt, self._rank, what)
        return self._open(path=path, log=None)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of the start-up."""
        begin = time.perf_counter()
        yield
        self.startup[name] = time.perf_counter() - begin

    def record_startup(self, first_s: float, compiles: bool) -> None:
        """Record the start-up; first_s: of the first iteration, in which a model is compiled."""
        self.startup["total_s"] = self.startup.get("total_s", 0.0) + first_s * compiles
        compile_s, first_step_s = (first_s, None) if compiles else (None, first_s)
        self.record("startup", **self.startup, compile_s=compile_s, first_step_s=first_step_s)

    def log(self, line: str, level: str = "INFO") -> None:
        """Write a line to this rank's own log only."""
        if self._paths:
            stamp = datetime.now().isoformat(timespec="milliseconds")
            # A full disk ends no training, nor does a line after the end.
            with contextlib.suppress(OSError, ValueError):
                print(f"{stamp} rank {self._rank} {level} {line}", file=self.stream)

    def say(self, line: str) -> None:
        """Log a line on every rank; rank 0 prints it."""
        self.log(line)
        if self._rank == 0:
            print(line, flush=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Write a [METRIC] record (rank 0)."""
        if self.writer:
            self.writer.write(kind, **fields)

    def warn(self, text: str) -> None:
        """Print and record a warning, which the report shows."""
        self.log(text, "WARNING")
        if self._rank == 0:
            print(f"warning: {text}", flush=True)
        self.record("message", level="warning", text=text)

    def info(self, text: str) -> None:
        """Print and record a piece of information."""
        self.say(text)
        self.record("message", level="info", text=text)

    def close(self) -> None:
        if self.writer:
            self.writer.close()
        if self._paths:
            with contextlib.suppress(OSError):
                self.stream.close()


def check_folder(paths: RunPaths, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the run's folder has; UsageError if it was made for another run.

    Those that are "auto" in spec are decided by the ranks.
    """
    planned = (read_json(paths.spec) or {}).get("spec") if paths.spec.exists() else {}
    if not isinstance(planned, dict):
        raise UsageError(f"{paths.spec} is corrupt, or cannot be read: choose another --run-dir")
    for name in (n for n in spec if n in OF_IDENTITY):  # in their order: the first is reported
        if spec[name] not in ("auto", planned.get(name, spec[name])):
            raise UsageError(
                f"{paths.folder} was made for another run: {name} is {planned.get(name)!r} there "
                f"and {spec[name]!r} here; choose another --run-dir"
            )
    return planned


def write_spec(paths: RunPaths, spec: dict[str, Any], rank: int) -> None:
    """Write spec.json in the run's folder (rank 0), over what a preflight that failed left.

    Raises UsageError, on every rank, if the folder was made for another run.
    """
    planned = check_folder(paths, spec)
    if rank == 0 and not spec.keys() <= planned.keys():
        study, run_id = paths.folder.parent.name, paths.folder.name
        write_json(paths.spec, {"v": 1, "study": study, "run_id": run_id, "spec": spec})


def write_outcome(
    paths: RunPaths | None, attempt: int, status: str, exit_code: int, reason: str = ""
) -> str:
    """Write how the attempt ended; return the recorded reason.

    The first rank to write wins: the others fail because that one did.
    """
    if paths is None:
        return reason
    content = {  # flat: run.sh looks for exit_code without a reader of JSON
        "exit_code": exit_code,
        "status": status,
        "reason": reason[:2000],
        "run_id": paths.folder.name,
        "attempt": attempt,
    }
    path = paths.outcome(attempt)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(beside, path)
        beside.unlink()
    except OSError as error:
        if status == "ok":
            raise
        # Something else has failed already, and that must be reported.
        print(f"warning: the outcome could not be written: {error}", file=sys.stderr, flush=True)
    return str((read_json(path) or content).get("reason") or reason)
