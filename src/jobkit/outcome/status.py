"""What became of a run, told from its own files: its status, and the line that proves it.

    state = run_state(RunPaths(folder), launcher_alive=is_alive(read_json(study.launcher)))

The launcher asks it which runs to start again; the collector makes a row of results.csv from it.
"""

import io
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jobkit.errors import Exit
from jobkit.metric import reader
from jobkit.metric.line import Record
from jobkit.metric.reader import Rejected
from jobkit.outcome.evidence import (
    Sign,
    Tail,
    clean,
    find_log,
    find_sign,
    judge,
    of_newest,
    read_tail,
    went_on,
)
from jobkit.outcome.liveness import is_alive, process_start
from jobkit.paths import RunPaths, read_job, read_json

__all__ = ["STATUSES", "RunState", "is_alive", "process_start", "run_state"]

STATUSES = (
    "ok",
    "running",
    "pending",
    "failed",
    "oom",
    "timeout",
    "preempted",
    "cancelled",
    "node_fail",
    "missing",
)
ENDINGS = ("ok", "failed", "preempted")  # what a payload says of itself
# A run that nobody can be asked about runs as long as its files were written so lately.
FRESH_S = 120.0
_METRICS_TAIL = 256 << 10


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What became of a run, and how that is known."""

    status: str  # one of STATUSES
    reason: str = ""  # why, when not ok, in one line
    evidence: str = ""  # the line that proves it, as it stands in evidence_file
    evidence_file: str = ""  # RUN_ID/FILE or RUN_ID/FILE:LINE
    attempt: int | None = None  # the newest; None where none is known
    attempts: int = 0  # how many were started
    exit_code: int | None = None  # the job's where the launcher saw it, else the payload's


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How an attempt ended, in the payload's own words."""

    status: str
    reason: str
    file: str
    exit_code: int | None = None


def run_state(paths: RunPaths, launcher_alive: bool | None = False) -> RunState:
    """Tell what became of a run. launcher_alive: whether its study's launcher is at work.

    The first of these that says something wins: how the newest attempt ended, in its own words;
    the launcher's job.json; tell-tale lines of the logs. No run is ok without its own word for it.
    """
    numbers, job, tail = paths.attempt_numbers(), read_job(paths), None
    if not numbers:
        tail = read_tail(paths.log)
        numbers = _attempts_in(tail)
    newest = numbers[-1] if numbers else None
    first = _first_attempt(job)
    started = newest is None or newest >= first  # else all that is there is of an earlier start
    alive = bool(job and job.get("ended") is None and is_alive(job))
    ending = _ending(paths, newest, tail, alive) if started else None
    code = _exit_code(job, ending)
    state = RunState(
        status="", attempt=newest, attempts=0 if newest is None else newest + 1, exit_code=code
    )
    if ending and ending.status == "ok":
        reason = f"its job ended with exit code {code} after that" if code else ""
        return replace(state, status="ok", reason=reason)
    if ending is None and job is None and newest is None and find_log(paths.log) is None:
        return _not_started(state, launcher_alive)
    if job and alive:  # after a bad end it may start the next attempt
        return replace(state, status="running", reason=f"process {job['pid']}")
    tail = of_newest(tail or read_tail(paths.log), newest if started else first)
    tails = [tail, of_newest(read_tail(paths.scheduler_log), newest)]
    if ending:
        return _ended(paths, state, ending, tails)
    return _silent(paths, state, job, tails)


def _first_attempt(job: Mapping[str, Any] | None) -> int:
    """The attempt with which the start began that job.json tells of."""
    first = (job or {}).get("first_attempt")
    return first if type(first) is int else 0


def _attempts_in(tail: Tail) -> list[int]:
    """The attempts that have records in a log."""
    records = reader.scan(io.BytesIO(tail.raw))
    return sorted({r["attempt"] for r in records if isinstance(r, dict) and "v" in r})


def _ending(paths: RunPaths, attempt: int | None, tail: Tail | None, alive: bool) -> _Ending | None:
    """How the newest attempt ended, in its own words: its outcome, else its run_end."""
    path = paths.outcome(attempt or 0)
    outcome = (read_json(path) if attempt is not None else None) or {}
    if outcome.get("status") not in ENDINGS:
        return None if alive else _run_end(paths, attempt, tail)
    code = outcome.get("exit_code")
    return _Ending(
        status=outcome["status"],
        reason=str(outcome.get("reason") or ""),
        file=str(path.relative_to(paths.folder.parent)),
        exit_code=code if type(code) is int else None,
    )


def _run_end(paths: RunPaths, attempt: int | None, tail: Tail | None) -> _Ending | None:
    """The run_end record of the attempt, from its metrics file, else from the log."""
    metrics = paths.metrics(attempt) if attempt is not None else None
    found: list[Record] = []
    file = metrics
    if metrics and metrics.is_file():
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - _METRICS_TAIL))
            found = _ends(reader.read_file(stream), attempt)
    if not found:
        tail, file = tail or read_tail(paths.log), paths.log
        found = _ends(reader.scan(io.BytesIO(tail.raw)), attempt)
    if not found or file is None:
        return None
    end = reader.merge_parts(found)
    name = file.relative_to(paths.folder.parent)
    return _Ending(
        status=end["status"],
        reason=str(end.get("reason") or ""),
        file=str(name),
    )


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


def _exit_code(job: Mapping[str, Any] | None, ending: _Ending | None) -> int | None:
    """The exit code that the launcher saw, else the one that the payload meant to end with."""
    code = (job or {}).get("exit_code")
    return code if type(code) is int else ending.exit_code if ending else None


def _not_started(state: RunState, launcher_alive: bool | None) -> RunState:
    if launcher_alive:
        return replace(state, status="pending", reason="its study is being launched")
    return replace(state, status="missing", reason="planned, never started")


def _ended(paths: RunPaths, state: RunState, ending: _Ending, tails: list[Tail]) -> RunState:
    """A run that said itself that it failed or was preempted: why."""
    if ending.status == "preempted":
        if (by := _strongest(tails)) and by[1].of_scheduler and by[1].status != "preempted":
            return _by_sign(paths, state, *by)  # it says who wished the end, and why
        reason = clean(ending.reason) or "preempted"
        # INT or TERM to run.sh itself: somebody wished the end of the run, not only of its ranks.
        ended = state.exit_code in (Exit.INTERRUPTED, Exit.TERMINATED)
        status = "cancelled" if ended else "preempted"
        return replace(
            state, status=status, reason=reason, evidence=reason, evidence_file=ending.file
        )
    own, said = judge(ending.reason), _strongest(tails)
    if said and (said[1].strength >= own.strength or not ending.reason):
        return _by_sign(paths, state, *said)
    reason = own.reason or "it ended with status failed"
    return replace(
        state, status=own.status, reason=reason, evidence=own.text, evidence_file=ending.file
    )


def _silent(
    paths: RunPaths, state: RunState, job: Mapping[str, Any] | None, tails: list[Tail]
) -> RunState:
    """A run that left no word of its end: by the log, the exit code, or how long it is silent."""
    said = _strongest(tails)
    if said and not went_on(*said):
        return _by_sign(paths, state, *said)
    if job and state.exit_code is not None:
        status, reason = _by_exit_code(state.exit_code)
        return _last_words(paths, replace(state, status=status, reason=reason), tails[0])
    if job and job.get("ended") is None and is_alive(job) is None:
        return _out_of_sight(state, job)
    if job:
        reason = f"its process {job.get('pid')} is gone and left no end"
        return _last_words(paths, replace(state, status="failed", reason=reason), tails[0])
    if (age := time.time() - _written(paths)) < FRESH_S:
        return replace(state, status="running", reason=f"its files were written {age:.0f} s ago")
    reason = "no word of its end: no run_end, no outcome"
    return _last_words(paths, replace(state, status="failed", reason=reason), tails[0])


def _strongest(tails: list[Tail]) -> tuple[Tail, Sign] | None:
    """The line of all logs that says most about the end, and its log; of equals, the first."""
    signs = [(tail, sign) for tail in tails if (sign := find_sign(tail))]
    return max(signs, key=lambda pair: pair[1].strength, default=None)


def _by_sign(paths: RunPaths, state: RunState, tail: Tail, sign: Sign) -> RunState:
    return replace(
        state,
        status=sign.status,
        reason=sign.reason,
        evidence=sign.text,
        evidence_file=f"{paths.folder.name}/{tail.name}:{sign.line}",
    )


def _last_words(paths: RunPaths, state: RunState, tail: Tail) -> RunState:
    """Where nothing tells why, the last line of the log is the evidence."""
    said = [(n, clean(text)) for n, text in tail.lines if "[METRIC]" not in text and clean(text)]
    if not said:
        return state
    number, text = said[-1]
    return replace(state, evidence=text, evidence_file=f"{paths.folder.name}/{tail.name}:{number}")


def _by_exit_code(code: int) -> tuple[str, str]:
    """Status and reason for an exit code: 128 + signal from a shell, -signal from Python."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name if number > 0 else ""
    except ValueError:
        name = ""
    if name:
        stopped = name in ("SIGINT", "SIGTERM")  # somebody wished it: no fault of the run
        return "cancelled" if stopped else "failed", f"ended by {name} (exit code {code})"
    if code == Exit.AGAIN:
        return "preempted", "stopped early with a checkpoint (exit code 75)"
    if code == 0:
        return "failed", "ended with exit code 0, but left no end: did it train at all?"
    return "failed", f"ended with exit code {code}"


def _out_of_sight(state: RunState, job: Mapping[str, Any]) -> RunState:
    """A job that cannot be asked after from here, and whose log says nothing of an end."""
    where = f"Slurm job {job['job_id']}" if job.get("job_id") else f"a job on {job.get('host')}"
    if state.attempt is None:
        return replace(state, status="pending", reason=clean(f"{where} has not begun"))
    return replace(state, status="running", reason=clean(f"{where} has not said its end"))


def _written(paths: RunPaths) -> float:
    """When the run's files were last written, in Unix seconds."""
    files = [*paths.metrics_folder.glob("*.jsonl"), *filter(None, [find_log(paths.log)])]
    return max((file.stat().st_mtime for file in files), default=0.0)
