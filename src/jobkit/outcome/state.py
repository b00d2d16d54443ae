"""The status of a run, decided from its files, its process and Slurm, with the line that shows it.

    state = judge(read_facts(RunPaths(folder)))

The launcher asks it which runs to start again; the collector makes a row of results.csv from it.
A run goes on while it is read: what is read first may be of another moment than what is read last.
The order makes that harmless. Whether the process is at work is asked before how it ended, so that
one that is gone had written its end by then; and where a start, an end or an attempt came while
the rest was read, all is read once more.
"""

import contextlib
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jobkit.errors import Exit
from jobkit.files import closed, file_names, is_regular, read_tail, written_ago_s
from jobkit.outcome import evidence
from jobkit.outcome.evidence import clean, find_sign, of_newest, with_hint
from jobkit.outcome.slurm_jobs import GONE, Job, cluster
from jobkit.paths import RunPaths, StudyPaths, read_json
from jobkit.processes import is_alive, is_at_work

ENDINGS = ("ok", "failed", "preempted")  # what a payload says of itself
UNDER_WAY = ("running", "pending")
BAD_ENDS = ("failed", "oom", "timeout", "preempted", "cancelled", "node_fail")
FINAL = ("ok", *BAD_ENDS)
STATUSES = ("ok", *UNDER_WAY, *BAD_ENDS, "missing")
# A run whose process cannot be queried counts as running if its files changed within this time.
FRESH_S = 120.0
Ask = Callable[[Iterable[str]], Mapping[str, Job]]  # what Slurm says of jobs, by their ids
_MAX_REASON = 4096  # characters


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a run at one moment."""

    run_id: str
    job: Mapping[str, Any] | None = None  # who runs its newest start
    alive: bool | None = False  # whether that process is at work; None: not to be told from here
    attempt: int | None = None  # the newest; None: none is known
    ending: Mapping[str, Any] | None = None  # of that attempt, see read_ending
    logged: bool = False  # there is a log
    closed: str = ""  # why its folder cannot be read, where nothing of it is seen
    age_s: float | None = None  # since its files were last written, where nobody tells of its end
    # The last lines of its log and of Slurm's, by their names; none where they decide nothing.
    tails: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The status of a run, and the evidence for it."""

    status: str  # one of STATUSES
    reason: str = ""  # why, when not ok, in one line, with a hint where one is known
    evidence: str = ""  # the line that proves it, verbatim from evidence_file
    evidence_file: str = ""  # RUN_ID/FILE
    attempt: int | None = None  # the newest; None where none is known
    attempts: int = 0  # how many were started
    exit_code: int | None = None  # the job's where the launcher saw it, else the payload's


# --- the facts of a run ----------------------------------------------------------------------


def read_facts(paths: RunPaths) -> Facts:
    """Return the facts about a run, consistent as of one moment."""
    mark = _mark(paths)
    facts = _read_once(paths, *mark)
    if facts.ending and facts.ending["status"] == "ok":
        return facts  # it stays so; of thousands of runs a second look would take seconds
    later = _mark(paths)
    return facts if later == mark else _read_once(paths, *later)


def read_job(paths: RunPaths, names: Collection[str] | None = None) -> dict[str, Any] | None:
    """Who runs the newest start of a run: job.json, or the submission that has not started yet.

    names: what lies in its folder, if it was read already; what is not there is not opened.
    """
    names = file_names(paths.folder) if names is None else names
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


def _mark(paths: RunPaths) -> tuple[dict[str, Any] | None, list[int], bool]:
    """What changes with a new start, end or attempt: who runs it, its attempts, its log."""
    names = file_names(paths.folder)
    logged = "train.log" in names and is_regular(paths.log)
    return read_job(paths, names), paths.attempt_numbers(), logged


def _read_once(
    paths: RunPaths, job: Mapping[str, Any] | None, numbers: list[int], logged: bool
) -> Facts:
    """Return the facts, if nothing changes meanwhile; the order of the steps matters."""
    alive = is_at_work(job) if job and job.get("ended") is None else False
    newest, first = numbers[-1] if numbers else None, (job or {}).get("first_attempt")
    first = first if type(first) is int else 0  # of the start that job.json describes
    started = newest is None or newest >= first  # else all that is there is of an earlier start
    ending = None if newest is None or not started else read_ending(paths, newest)
    tails: dict[str, list[str]] = {}
    ok = ending is not None and ending["status"] == "ok"
    age_s = None if ok or _is_observed(job, alive) else _age_s(paths, numbers, logged)
    if not alive and not ok:
        tails[paths.log.name] = of_newest(read_tail(paths.log), newest if started else first)
        ended = ending is not None and ending["status"] != "preempted"
        at_work = newest is not None and started and not ended
        if at_work or not (job or {}).get("shared"):  # else it is of another run of the job
            tails[paths.scheduler_log.name] = of_newest(read_tail(paths.scheduler_log), newest)
    return Facts(
        run_id=paths.folder.name,
        closed="" if job or numbers or logged else closed(paths.folder),
        job=job,
        alive=alive,
        attempt=newest,
        ending=ending,
        logged=logged,
        age_s=age_s,
        tails=tails,
    )


def _is_observed(job: Mapping[str, Any] | None, alive: bool | None) -> bool:
    """Whether somebody tells of a run's end: its process, Slurm, or a launcher that waits for it.

    Nobody does of a run.sh alone that was killed on another machine or in a container, nor of what
    ran in a container with this machine's name, which may have been restarted.
    """
    if not job or alive is not None or job.get("job_id"):
        return bool(job)
    return job.get("launcher") != "run.sh" and job.get("host") != socket.gethostname()


def read_ending(paths: RunPaths, attempt: int) -> Mapping[str, Any] | None:
    """How an attempt ended, as recorded: status, reason, exit_code and file, RUN_ID/FILE."""
    file = paths.outcome(attempt)
    end = read_json(file)
    if not end or end.get("status") not in ENDINGS:
        return None
    code = end.get("exit_code")
    return {
        "status": end["status"],
        "reason": str(end.get("reason") or "")[:_MAX_REASON],
        "exit_code": code if type(code) is int else None,
        "file": str(file.relative_to(paths.folder.parent)),
    }


def _age_s(paths: RunPaths, attempts: list[int], logged: bool) -> float | None:
    """Seconds since the run's files were last written. An attempt's folder comes before them."""
    files = [paths.attempts / str(number) for number in attempts[-1:]]
    names = [n for n in file_names(paths.metrics_folder) if n.endswith(".jsonl")]
    files += [paths.metrics_folder / name for name in names]
    return written_ago_s([*files, *([paths.log] if logged else [])])


# --- the verdict -----------------------------------------------------------------------------


def run_state(paths: RunPaths) -> RunState:
    """Return the state of a run, from its own files and process."""
    return judge(read_facts(paths))


def judge(facts: Facts, ordered: bool = False) -> RunState:
    """Return the state of a run. No run is ok without a record that says so.

    ordered: an active launcher has still to start it, whatever it was before.
    """
    newest, end, code = facts.attempt, facts.ending, (facts.job or {}).get("exit_code")
    code = code if type(code) is int else end["exit_code"] if end else None
    status, reason, *line = ("pending", "queued") if ordered else _verdict(facts, code)
    text, file = line or ("", "")
    return RunState(
        status=status,
        reason=with_hint(reason, text),
        evidence=text,
        evidence_file=file,
        attempt=newest,
        attempts=0 if newest is None else newest + 1,
        exit_code=code,
    )


def _verdict(facts: Facts, code: int | None) -> tuple[str, ...]:
    """The first case that applies: status and reason, with the line that shows it and its place."""
    job, end, age = facts.job, facts.ending, facts.age_s
    requested = (Exit.INTERRUPTED, Exit.TERMINATED)  # somebody asked for the end
    if end and end["status"] == "ok":
        return "ok", f"its job then ended with exit code {code}" if code else ""
    if not (job or end or facts.attempt is not None or facts.logged):
        why = f"its folder cannot be read: {facts.closed}" if facts.closed else ""
        return "missing", why or "planned, never started"
    if job and facts.alive:  # also after a failed attempt: it may start the next one
        return "running", f"process {job['pid']}"
    found = ((find_sign(lines), f"{facts.run_id}/{name}") for name, lines in facts.tails.items())
    signs = ((sign, file) for sign, file in found if sign)
    sign, file = max(signs, key=lambda pair: pair[0].strength, default=(None, ""))
    by_sign = (sign.status, sign.reason, sign.text, file) if sign else ()
    if end and end["status"] == "preempted":
        if sign and sign.of_scheduler and sign.status != "preempted":
            return by_sign  # it says who requested the end, and why
        reason = clean(end["reason"]) or "preempted"
        # INT or TERM to run.sh itself is for the run, not only for its ranks.
        return "cancelled" if code in requested else "preempted", reason, reason, end["file"]
    if end:
        recorded = evidence.judge(end["reason"])
        if sign and (sign.strength >= recorded.strength or not end["reason"]):
            return by_sign
        status = "cancelled" if end["exit_code"] in requested else recorded.status
        reason = recorded.reason or "the run recorded status failed"
        return status, reason, recorded.text, end["file"]
    if sign:
        return by_sign
    if job and code is not None:
        return *_by_exit_code(code), *_last_line(facts)
    if job and facts.alive is None and age is None:  # not to be queried from here
        where = f"Slurm job {job['job_id']}" if job.get("job_id") else f"a job on {job.get('host')}"
        where += f" of cluster {job['cluster']}" if job.get("cluster") else ""
        if facts.attempt is None:
            return "pending", clean(f"{where} has not started the run")
        return "running", clean(f"{where} has not recorded an end")
    if job and facts.alive is not None:
        reason = f"its process {job.get('pid')} exited without an outcome file"
    elif age is not None and abs(age) < FRESH_S:  # below 0: another machine's clock is ahead
        when = f"{age:.0f} s ago" if age >= 0 else f"{-age:.0f} s ahead of this machine's clock"
        return "running", f"its files changed {when}"
    else:
        reason = "exited without an outcome file"
    return "failed", reason, *_last_line(facts)


def _last_line(facts: Facts) -> tuple[str, str]:
    """Without a better line, the last line of the log is the evidence."""
    name, lines = next(iter(facts.tails.items()), ("", []))
    texts = (clean(text) for text in reversed(lines) if "[METRIC]" not in text)
    return next(((text, f"{facts.run_id}/{name}") for text in texts if text), ("", ""))


def _by_exit_code(code: int) -> tuple[str, str]:
    """Status and reason for an exit code: 128 + signal from a shell, -signal from Python."""
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code if code < 0 else code - 128).name
        stopped = name in ("SIGINT", "SIGTERM")  # it was requested: no fault of the run
        return "cancelled" if stopped else "failed", f"ended by {name} (exit code {code})"
    if code == Exit.AGAIN:
        return "preempted", "stopped early with a checkpoint (exit code 75)"
    if code == Exit.PREFLIGHT:
        return "failed", "a check of --preflight failed (exit code 5): its job's log has the FAULT"
    if code == 0:
        return "failed", "exit code 0 without an outcome file"
    return "failed", f"ended with exit code {code}"


def merged(state: RunState, job: Job | None, shared: bool = False) -> RunState:
    """Return the state of a run, from its own files and Slurm's state of its job.

    A success that the run recorded takes precedence, and so does its reason for a failure; Slurm
    decides what ended a job from outside, and whether it is pending or running. shared: the job
    runs several runs one after the other, so that its state says nothing of one of them.
    """
    if job is None or state.status == "ok" or not (job.status or job.state == GONE):
        return state
    unrecorded = "the run exited without an outcome file"
    if job.state == GONE:
        reason = f"job {job.job_id} not found in Slurm, and "
        if state.status == "pending":
            return replace(state, status="missing", reason=f"{reason}the run left no files")
        running = state.status == "running"
        return replace(state, status="failed", reason=reason + unrecorded) if running else state
    status, reason, line = job.status, with_hint(job.line, ""), job.line
    if shared and (status == "running" or state.status not in UNDER_WAY):
        return state
    if shared and state.status == "pending" and status not in (*UNDER_WAY, "cancelled"):
        return replace(state, status="missing", reason=reason, evidence=line)
    if status in UNDER_WAY:
        where = job.reason if status == "pending" else job.node_list
        reason, line = f"Slurm job {job.job_id}" + (f": {where}" if where else ""), ""
    elif status in ("ok", "failed"):
        if state.status not in (*UNDER_WAY, "missing"):
            return state
        status, reason = "failed", f"{reason}; {unrecorded}"
    elif state.status == status and state.evidence:
        return replace(state, reason=reason)
    return replace(state, status=status, reason=reason, evidence=line, evidence_file="")


# --- the runs of a study -----------------------------------------------------------------------


def join(
    runs: Mapping[str, RunPaths],
    ordered: Collection[str],
    ask: Ask,
    all_jobs: bool = True,
    here: Callable[[], str | None] = cluster,
) -> tuple[dict[str, RunState], dict[str, Job]]:
    """Return the state of each run, and Slurm's data on its job where there is any.

    ordered: of ordered_runs, asked before. all_jobs: ask after the jobs of runs that are ok too.
    here: the name of the cluster that is asked, None if not known.
    """

    def look(run_id: str) -> tuple[RunState, Mapping[str, Any]]:
        """The state of a run by its files alone; and who runs its newest start."""
        facts = read_facts(runs[run_id])
        return judge(facts, run_id in ordered), facts.job or {}

    looks, jobs = {run_id: look(run_id) for run_id in runs}, dict[str, Job]()
    ids = {
        run_id: job_id
        for run_id, (state, start) in looks.items()
        if (job_id := _slurm_job_id(start)) and (all_jobs or state.status != "ok")
    }
    # Jobs of another cluster have numbers that other jobs have here. Where this cluster's name is
    # not known, each cluster that is noted may be another one.
    noted = {run_id: looks[run_id][1].get("cluster") for run_id in ids}
    name = here() if any(noted.values()) else None
    ids = {run_id: job_id for run_id, job_id in ids.items() if noted[run_id] in (None, name)}
    answers = ask(ids.values()) if ids else {}
    for run_id, job_id in ids.items():
        if (job := answers.get(job_id)) is None:
            continue
        ended = job.state == GONE or (job.status and job.status not in UNDER_WAY)
        if ended and looks[run_id][0].status != "ok":
            # It may have ended well between the look at its files and Slurm's answer.
            looks[run_id] = look(run_id)
        state, start = looks[run_id]
        if _slurm_job_id(start) == job_id:  # else it was started again meanwhile
            jobs[run_id] = job
            looks[run_id] = merged(state, job, bool(start.get("shared"))), start
    return {run_id: state for run_id, (state, _) in looks.items()}, jobs


def _slurm_job_id(start: Mapping[str, Any]) -> str:
    """The Slurm job of a run's newest start, by who runs that."""
    return str(start.get("job_id") or "")


def job_ids(runs: Iterable[RunPaths]) -> list[str]:
    """The Slurm jobs of the newest starts of the runs."""
    ids = (_slurm_job_id(read_job(paths) or {}) for paths in runs)
    return list(dict.fromkeys(filter(None, ids)))


def ordered_runs(study: StudyPaths, planned: Iterable[str]) -> set[str]:
    """Return the runs that an active launcher on this machine has still to start.

    It has a key, and a run counts as started once its job.json has it: clocks may jump.
    """
    record = read_json(study.launcher)
    if not record or not is_alive(record) or not isinstance(record.get("run_ids"), list):
        return set()
    ids = {run_id for run_id in record["run_ids"] if isinstance(run_id, str)}
    jobs = {i: read_json(study.run(i).job) or {} for i in planned if i in ids}
    return {run_id for run_id, job in jobs.items() if job.get("order") != record.get("key")}
