"""The status of a run, decided from the facts about it, with the line that shows it.

    state = judge(read(RunPaths(folder)))

The launcher asks it which runs to start again; the collector makes a row of results.csv from it.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from jobkit.errors import Exit
from jobkit.outcome import evidence
from jobkit.outcome.evidence import Sign, clean, find_sign, went_on
from jobkit.outcome.facts import Facts, read, seconds
from jobkit.outcome.logs import Tail
from jobkit.paths import RunPaths

UNDER_WAY = ("running", "pending")
BAD_ENDS = ("failed", "oom", "timeout", "preempted", "cancelled", "node_fail")
FINAL = ("ok", *BAD_ENDS)
STATUSES = ("ok", *UNDER_WAY, *BAD_ENDS, "missing")
# A run whose process cannot be queried counts as running if its files changed within this time.
FRESH_S = 120.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The status of a run, and the evidence for it."""

    status: str  # one of STATUSES
    reason: str = ""  # why, when not ok, in one line
    evidence: str = ""  # the line that proves it, verbatim from evidence_file
    evidence_file: str = ""  # RUN_ID/FILE or RUN_ID/FILE:LINE
    attempt: int | None = None  # the newest; None where none is known
    attempts: int = 0  # how many were started
    exit_code: int | None = None  # the job's where the launcher saw it, else the payload's


def run_state(paths: RunPaths) -> RunState:
    """Return the state of a run, from its own files and process."""
    return judge(read(paths))


def judge(facts: Facts, ordered: float | None = None) -> RunState:
    """Return the state of a run. No run is ok without a record that says so.

    ordered: when an active launcher was asked to start it, in Unix seconds; None: it was not.
    """
    newest, job, end = facts.attempt, facts.job or {}, facts.ending
    code = job.get("exit_code")
    state = RunState(
        status="",
        attempt=newest,
        attempts=0 if newest is None else newest + 1,
        exit_code=code if type(code) is int else end.exit_code if end else None,
    )
    if ordered is not None and seconds(job.get("started")) < ordered:  # whatever it was before
        return replace(state, status="pending", reason="queued")
    return next(found for case in _CASES if (found := case(facts, state)))


def _ended_well(facts: Facts, state: RunState) -> RunState | None:
    if facts.ending is None or facts.ending.status != "ok":
        return None
    code = state.exit_code
    reason = f"its job then ended with exit code {code}" if code else ""
    return replace(state, status="ok", reason=reason)


def _never_started(facts: Facts, state: RunState) -> RunState | None:
    if facts.job or facts.ending or facts.attempt is not None or facts.logged:
        return None
    why = f"its folder cannot be read: {facts.closed}" if facts.closed else "planned, never started"
    return replace(state, status="missing", reason=why)


def _at_work(facts: Facts, state: RunState) -> RunState | None:
    """A live process means running, also after a failed attempt: it may start the next one."""
    if not (facts.job and facts.alive):
        return None
    return replace(state, status="running", reason=f"process {facts.job['pid']}")


def _stopped_early(facts: Facts, state: RunState) -> RunState | None:
    """Return the state of a run that recorded preemption, with its cause."""
    end = facts.ending
    if end is None or end.status != "preempted":
        return None
    if (by := _strongest(facts)) and by[1].of_scheduler and by[1].status != "preempted":
        return _by_sign(facts, state, *by)  # it says who requested the end, and why
    reason = clean(end.reason) or "preempted"
    # INT or TERM to run.sh itself: somebody requested the end of the run, not only of its ranks.
    ended = state.exit_code in (Exit.INTERRUPTED, Exit.TERMINATED)
    status = "cancelled" if ended else "preempted"
    return replace(state, status=status, reason=reason, evidence=reason, evidence_file=end.file)


def _recorded_failure(facts: Facts, state: RunState) -> RunState | None:
    """Return the state of a run that recorded a failure, with its cause."""
    end = facts.ending
    if end is None:
        return None
    own, said = evidence.judge(end.reason), _strongest(facts)
    if said and (said[1].strength >= own.strength or not end.reason):
        return _by_sign(facts, state, *said)
    reason = own.reason or "the run recorded status failed"
    # INT or TERM ended its ranks: somebody requested it, and that is no failure of the run.
    asked = end.exit_code in (Exit.INTERRUPTED, Exit.TERMINATED)
    status = "cancelled" if asked else own.status
    return replace(state, status=status, reason=reason, evidence=own.text, evidence_file=end.file)


def _by_the_log(facts: Facts, state: RunState) -> RunState | None:
    said = _strongest(facts)
    return _by_sign(facts, state, *said) if said and not went_on(*said) else None


def _by_the_exit_code(facts: Facts, state: RunState) -> RunState | None:
    if not facts.job or state.exit_code is None:
        return None
    status, reason = _by_exit_code(state.exit_code)
    return _with_last_line(facts, replace(state, status=status, reason=reason))


def _not_observable(facts: Facts, state: RunState) -> RunState | None:
    """A job that cannot be queried from here, of whose end the log says nothing yet."""
    if not (job := facts.job) or facts.alive is not None or facts.age_s is not None:
        return None
    where = f"Slurm job {job['job_id']}" if job.get("job_id") else f"a job on {job.get('host')}"
    where += f" of cluster {job['cluster']}" if job.get("cluster") else ""
    if state.attempt is None:
        return replace(state, status="pending", reason=clean(f"{where} has not started"))
    return replace(state, status="running", reason=clean(f"{where} has not recorded an end"))


def _gone(facts: Facts, state: RunState) -> RunState | None:
    if not facts.job or facts.alive is None:
        return None
    reason = f"its process {facts.job.get('pid')} exited without a run_end record"
    return _with_last_line(facts, replace(state, status="failed", reason=reason))


def _written_lately(facts: Facts, state: RunState) -> RunState | None:
    age = facts.age_s
    if age is None or abs(age) >= FRESH_S:  # below 0: another machine's clock is ahead
        return None
    when = f"{age:.0f} s ago" if age >= 0 else f"{-age:.0f} s ahead of this machine's clock"
    return replace(state, status="running", reason=f"its files changed {when}")


def _silent(facts: Facts, state: RunState) -> RunState:
    reason = "exited without a run_end record or an outcome file"
    return _with_last_line(facts, replace(state, status="failed", reason=reason))


# The first case that says something wins; the last one always does.
_CASES: tuple[Callable[[Facts, RunState], RunState | None], ...] = (
    _ended_well,
    _never_started,
    _at_work,
    _stopped_early,
    _recorded_failure,
    _by_the_log,
    _by_the_exit_code,
    _not_observable,
    _gone,
    _written_lately,
    _silent,
)


def _strongest(facts: Facts) -> tuple[Tail, Sign] | None:
    """The line of all logs that best explains the end, and its log; of equals, the first."""
    signs = [(tail, sign) for tail in facts.tails if (sign := find_sign(tail))]
    return max(signs, key=lambda pair: pair[1].strength, default=None)


def _by_sign(facts: Facts, state: RunState, tail: Tail, sign: Sign) -> RunState:
    return replace(
        state,
        status=sign.status,
        reason=sign.reason,
        evidence=sign.text,
        evidence_file=_place(facts, tail, sign.line),
    )


def _with_last_line(facts: Facts, state: RunState) -> RunState:
    """Without a better line, the last line of the log is the evidence."""
    tail = facts.tails[0] if facts.tails else Tail("", [])
    said = [(n, clean(text)) for n, text in tail.lines if "[METRIC]" not in text and clean(text)]
    if not said:
        return state
    number, text = said[-1]
    return replace(state, evidence=text, evidence_file=_place(facts, tail, number))


def _place(facts: Facts, tail: Tail, line: int) -> str:
    """RUN_ID/FILE:LINE, without the line where its number is not known."""
    return f"{facts.run_id}/{tail.name}" + (f":{line}" if line else "")


def _by_exit_code(code: int) -> tuple[str, str]:
    """Status and reason for an exit code: 128 + signal from a shell, -signal from Python."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name if number > 0 else ""
    except ValueError:
        name = ""
    if name:
        stopped = name in ("SIGINT", "SIGTERM")  # it was requested: no fault of the run
        return "cancelled" if stopped else "failed", f"ended by {name} (exit code {code})"
    if code == Exit.AGAIN:
        return "preempted", "stopped early with a checkpoint (exit code 75)"
    if code == 0:
        return "failed", "exit code 0 without a run_end record"
    return "failed", f"ended with exit code {code}"
