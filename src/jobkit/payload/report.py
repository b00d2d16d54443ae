"""What a run writes: records, lines for people, rank logs, and the outcome for run.sh."""

import contextlib
import io
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any, TextIO

from jobkit.errors import UsageError
from jobkit.files import append_to
from jobkit.metric.kinds import MetricWriter
from jobkit.paths import RunPaths, read_json, write_json
from jobkit.spec.runspec import OF_IDENTITY

_LOGGER = logging.getLogger("jobkit.payload")


class Reporter:
    """Writes records and lines (rank 0) and a log per rank. Without a folder, lines only."""

    def __init__(self, paths: RunPaths | None, attempt: int, rank: int) -> None:
        self._is_rank_0 = rank == 0
        self._writer: MetricWriter | None = None
        self._place = (paths, attempt, rank)
        self._handler: logging.Handler = logging.NullHandler()
        if paths:
            _check_links(paths, attempt, rank)
            try:
                self._open(paths, attempt, rank)
            except OSError as error:
                raise UsageError(f"{paths.folder} is not writable: {error.strerror}") from None
        _LOGGER.addHandler(self._handler)
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False  # rank 0's lines are on its standard output already

    def _open(self, paths: RunPaths, attempt: int, rank: int) -> None:
        self._handler = _rank_handler(paths, attempt, rank)
        if self._is_rank_0:
            self._writer = MetricWriter(
                study=paths.folder.parent.name,
                run_id=paths.folder.name,
                attempt=attempt,
                rank=rank,
                path=paths.metrics(attempt),
                log=sys.stdout,
            )

    @property
    def writer(self) -> MetricWriter | None:
        """That of the run's records; None on other ranks than 0, and without a folder."""
        return self._writer

    @property
    def folder(self) -> Path | None:
        """The run's folder."""
        return self._place[0].folder if self._place[0] else None

    def rank_writer(self, what: str = "r") -> MetricWriter | None:
        """A writer of this rank's own records: windows of ranks above 0, samples (s), causes (w).

        None without a folder.
        """
        paths, attempt, rank = self._place
        if paths is None:
            return None
        return MetricWriter(
            study=paths.folder.parent.name,
            run_id=paths.folder.name,
            attempt=attempt,
            rank=rank,
            path=paths.metrics_of_rank(attempt, rank, what),
            log=None,
        )

    @property
    def stream(self) -> TextIO:
        """Where this rank's own lines go; standard error without a folder."""
        return getattr(self._handler, "stream", sys.stderr)

    def log(self, line: str, level: int = logging.INFO) -> None:
        """Write a line to this rank's own log only."""
        _LOGGER.log(level, "%s", line)

    def say(self, line: str) -> None:
        """Log a line on every rank; rank 0 prints it."""
        self.log(line)
        if self._is_rank_0:
            print(line, flush=True)

    def record(self, kind: str, **fields: Any) -> None:
        """Write a [METRIC] record (rank 0)."""
        if self._writer:
            self._writer.write(kind, **fields)

    def warn(self, text: str) -> None:
        """Print and record a warning, which the report shows."""
        self.log(text, logging.WARNING)
        if self._is_rank_0:
            print(f"warning: {text}", flush=True)
        self.record("message", level="warning", text=text)

    def info(self, text: str) -> None:
        """Print and record a piece of information."""
        self.say(text)
        self.record("message", level="info", text=text)

    def close(self) -> None:
        """Close the files."""
        if self._writer:
            self._writer.close()
        _LOGGER.removeHandler(self._handler)
        self._handler.close()


def _check_links(paths: RunPaths, attempt: int, rank: int) -> None:
    """Raise UsageError for a link in the place of what this rank writes to: it leads elsewhere."""
    log, trace = paths.rank_log(attempt, rank), paths.trace(attempt, rank)
    folders = (paths.attempts, paths.outcome(attempt).parent, paths.metrics_folder)
    for path in (*folders, log.parent.parent, log.parent, trace.parent, trace, paths.checkpoints):
        if path.is_symlink():
            raise UsageError(f"{path} is a link, through which would be written: remove it")


class _RankLog(logging.FileHandler):
    """Appends to a file that is the run's own."""

    def _open(self) -> "io.TextIOWrapper[Any]":
        return io.TextIOWrapper(io.BufferedWriter(append_to(self.baseFilename)), "utf-8")


def _rank_handler(paths: RunPaths, attempt: int, rank: int) -> logging.Handler:
    """A file for one rank's lines: time, rank, level, text."""
    path = paths.rank_log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _RankLog(path, encoding="utf-8")
    form = f"%(asctime)s.%(msecs)03d rank {rank} %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%Y-%m-%dT%H:%M:%S"))
    return handler


def write_spec(paths: RunPaths, spec: dict[str, Any], rank: int) -> None:
    """Write spec.json in the run's folder (rank 0), unless the launcher did already.

    Raises UsageError, on every rank, if the folder was made for another run.
    """
    if paths.spec.exists():
        _compare(paths, spec)
    elif rank == 0:
        study, run_id = paths.folder.parent.name, paths.folder.name
        write_json(paths.spec, {"v": 1, "study": study, "run_id": run_id, "spec": spec})


def _compare(paths: RunPaths, own: dict[str, Any]) -> None:
    """Raise UsageError if spec.json differs from this spec."""
    planned = (read_json(paths.spec) or {}).get("spec")
    if not isinstance(planned, dict):
        raise UsageError(f"{paths.spec} is corrupt: choose another --run-dir")
    for name in (n for n in own if n in OF_IDENTITY):  # in their order: the first is reported
        if planned.get(name, own[name]) != own[name]:
            raise UsageError(
                f"{paths.folder} was made for another run: {name} is {planned.get(name)!r} there "
                f"and {own[name]!r} here; choose another --run-dir"
            )


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
    try:
        if paths.attempts.is_symlink() or paths.outcome(attempt).parent.is_symlink():
            raise OSError(f"{paths.attempts} leads out of the run's folder")
        _write_first(paths.outcome(attempt), json.dumps(content) + "\n")
    except OSError as error:
        if status == "ok":
            raise
        # Something else has failed already, and that must be reported.
        print(f"warning: the outcome could not be written: {error}", file=sys.stderr, flush=True)
    return str((read_json(paths.outcome(attempt)) or content).get("reason") or reason)


def _write_first(path: Path, text: str) -> None:
    """Write a complete file, unless it exists already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
