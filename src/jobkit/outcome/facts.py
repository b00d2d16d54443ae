"""The facts about a run from its files and its process, read once.

    facts = read(RunPaths(folder))

A run goes on while it is read: what is read first may be of another moment than what is read last.
The order makes that harmless. Whether the process is at work is asked before how it ended, so that
one that is gone had written its end by then; and where a start, an end or an attempt came while
the rest was read, all is read again.
"""

import contextlib
import io
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.files import closed, file_names, is_regular
from jobkit.metric import reader
from jobkit.metric.line import Record
from jobkit.metric.reader import Rejected
from jobkit.outcome.evidence import of_newest
from jobkit.outcome.logs import Tail, open_log, read_tail
from jobkit.paths import RunPaths, read_json
from jobkit.processes import is_at_work

ENDINGS = ("ok", "failed", "preempted")  # what a payload says of itself
_METRICS_TAIL = 256 << 10
_LONGEST_REASON = 4096  # characters
_TRIES = 20  # a run starts, ends or begins an attempt only so often in a few milliseconds


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended, as the payload recorded it."""

    status: str  # one of ENDINGS
    reason: str = ""
    file: str = ""  # which says so: RUN_ID/FILE
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a run at one moment."""

    run_id: str
    job: Mapping[str, Any] | None = None  # who runs its newest start
    alive: bool | None = False  # whether that process is at work; None: not to be told from here
    attempt: int | None = None  # the newest; None: none is known
    ending: Ending | None = None  # of that attempt
    logged: bool = False  # there is a log
    closed: str = ""  # why its folder cannot be read, where nothing of it is seen
    age_s: float | None = None  # since its files were last written, where nobody tells of its end
    tails: tuple[Tail, ...] = ()  # of its log and of Slurm's; left out where they decide nothing


@dataclass(frozen=True)
class _Mark:
    """What changes with a new start, end or attempt."""

    job: Mapping[str, Any] | None
    attempts: list[int]
    log: Path | None


def read(paths: RunPaths) -> Facts:
    """Return the facts about a run, consistent as of one moment."""
    mark = _mark(paths)
    for _ in range(_TRIES):
        found = _read_once(paths, mark)
        if found.ending and found.ending.status == "ok":
            break  # it stays so; of thousands of runs a second look would take seconds
        before, mark = mark, _mark(paths)
        if mark == before:
            break
    return found


def read_job(paths: RunPaths) -> dict[str, Any] | None:
    """Who runs the newest start of a run: job.json, or the submission that has not started yet."""
    return _read_job(paths, paths.names)


def _read_job(paths: RunPaths, names: Collection[str]) -> dict[str, Any] | None:
    """As read_job, for a run whose folder has these names: what is not there is not opened."""
    job = read_json(paths.job) if "job.json" in names else None
    submission = read_json(paths.submission) if "submission.json" in names else None
    if submission is None:
        return job
    if job and job.get("job_id") == submission.get("job_id"):
        return {**job, "shared": submission.get("shared")}
    later = job and seconds(job.get("started")) >= seconds(submission.get("submitted"))
    return job if later else submission


def seconds(value: object) -> float:
    """A time in a file, in seconds; 0 where it is none."""
    return value if isinstance(value, int | float) and abs(value) < 1e15 else 0.0


def _mark(paths: RunPaths) -> _Mark:
    names = paths.names
    job = _read_job(paths, names)
    log = paths.log if "train.log" in names and is_regular(paths.log) else None
    return _Mark(job, paths.attempt_numbers(), log)


def _read_once(paths: RunPaths, mark: _Mark) -> Facts:
    """Return the facts, if nothing changes meanwhile; the order of the steps matters."""
    job, numbers, tail = mark.job, mark.attempts, None
    alive = is_at_work(job) if job and job.get("ended") is None else False
    if not numbers:  # a script of the user's own may leave a log only
        tail = read_tail(paths.log)
        numbers = _attempts_in(tail)
    newest, first = numbers[-1] if numbers else None, _first_attempt(job)
    started = newest is None or newest >= first  # else all that is there is of an earlier start
    ending = _ending(paths, newest, tail, alive is True) if started else None
    tails: tuple[Tail, ...] = ()
    ok = ending is not None and ending.status == "ok"
    age_s = None if ok or _is_told(job, alive) else _age_s(paths, mark)
    if not alive and not ok:
        log = of_newest(tail or read_tail(paths.log), newest if started else first)
        tails = (log, of_newest(read_tail(paths.scheduler_log), newest))
    seen = job or numbers or mark.log
    return Facts(
        run_id=paths.folder.name,
        closed="" if seen else closed(paths.folder),
        job=job,
        alive=alive,
        attempt=newest,
        ending=ending,
        logged=mark.log is not None,
        age_s=age_s,
        tails=tails,
    )


def _is_told(job: Mapping[str, Any] | None, alive: bool | None) -> bool:
    """Whether somebody tells of a run's end: its process, Slurm, or a launcher that waits for it.

    Nobody does of a run.sh alone that was killed on another machine or in a container, nor of what
    ran in a container with this machine's name, which may have been restarted.
    """
    if not job or alive is not None or job.get("job_id"):
        return bool(job)
    return job.get("launcher") != "run.sh" and job.get("host") != socket.gethostname()


def _first_attempt(job: Mapping[str, Any] | None) -> int:
    """The first attempt of the start that job.json describes."""
    first = (job or {}).get("first_attempt")
    return first if type(first) is int else 0


def _attempts_in(tail: Tail) -> list[int]:
    """The attempts that have records in a log."""
    records = reader.scan(io.BytesIO(tail.raw))
    return sorted({r["attempt"] for r in records if isinstance(r, dict) and "v" in r})


def _ending(paths: RunPaths, attempt: int | None, tail: Tail | None, alive: bool) -> Ending | None:
    """How the newest attempt ended: its outcome file, else its run_end record."""
    path = paths.outcome(attempt or 0)
    outcome = (read_json(path) if attempt is not None else None) or {}
    if outcome.get("status") not in ENDINGS:
        return None if alive else _run_end(paths, attempt, tail)
    code = outcome.get("exit_code")
    return Ending(
        status=outcome["status"],
        reason=str(outcome.get("reason") or "")[:_LONGEST_REASON],
        file="/".join((paths.folder.name, *path.parts[-3:])),
        exit_code=code if type(code) is int else None,
    )


def _run_end(paths: RunPaths, attempt: int | None, tail: Tail | None) -> Ending | None:
    """The run_end record of the attempt, from its metrics file, else from the log."""
    metrics = paths.metrics(attempt) if attempt is not None else None
    found: list[Record] = []
    file = metrics
    if metrics and is_regular(metrics):
        with contextlib.suppress(OSError), open_log(metrics, paths.folder.parent, None) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _METRICS_TAIL))
            found = _ends(reader.read_file(stream), attempt)
    if not found:
        tail, file = tail or read_tail(paths.log), paths.log
        found = _ends(reader.scan(io.BytesIO(tail.raw)), attempt)
    if not found or file is None:
        return None
    end = found[0]
    name = str(file.relative_to(paths.folder.parent))
    reason = str(end.get("reason") or "")[:_LONGEST_REASON]
    return Ending(status=end["status"], reason=reason, file=name)


def _ends(records: Iterable[Record | Rejected], attempt: int | None) -> list[Record]:
    """The run_end records of the attempt; those of a foreign script carry no attempt."""
    return [
        r
        for r in records
        if isinstance(r, dict)
        and r.get("kind") == "run_end"
        and r.get("status") in ENDINGS
        and r.get("attempt") == attempt
    ]


def _age_s(paths: RunPaths, mark: _Mark) -> float | None:
    """Seconds since the run's files were last written. An attempt's folder comes before them."""
    folders = [paths.attempts / str(number) for number in mark.attempts[-1:]]
    names = [n for n in file_names(paths.metrics_folder) if n.endswith(".jsonl")]
    metrics = [paths.metrics_folder / name for name in names]
    files = [*metrics, *filter(None, [mark.log]), *folders]
    times = [written for file in files if (written := _written(file)) is not None]
    return time.time() - max(times) if times else None


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
