"""The state of a plan's runs, from their files and from Slurm, and the progress of a run."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jobkit.errors import one_line
from jobkit.files import open_regular, written_ago_s
from jobkit.metric.kinds import Record
from jobkit.metric.reader import read_file
from jobkit.outcome import slurm_jobs
from jobkit.outcome.state import FINAL, UNDER_WAY, RunState, join, ordered_runs, read_job, seconds
from jobkit.paths import RunPaths
from jobkit.spec.command import PlannedRun
from jobkit.spec.study import Plan

SQUEUE_EVERY_S, SACCT_EVERY_S = 5.0, 30.0  # both are shared by all users of a cluster
_END_POLL_S, _END_WAIT_S = 2.0, 60.0
_TAIL_BYTES = 32 << 10
_MAX_NUMBER = 1e30  # a larger one is not shown


class States:
    """Reads the states repeatedly: ended runs only once, Slurm at a limited rate."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.of_runs: dict[str, RunState] = {}
        self.jobs: dict[str, slurm_jobs.Job] = {}  # by run: what Slurm last said of its job
        self.silence = ""  # the command of Slurm that gave no answer, and why
        self._cluster: str | None = None  # the name of the one that is asked, once it is known
        self._next = {"squeue": 0.0, "sacct": 0.0}  # when each may be asked again
        self._answers: dict[str, slurm_jobs.Job] = {}

    def look(self, fresh: bool = False) -> dict[str, RunState]:
        """Return the state of each planned run. fresh: query Slurm in any case."""
        if fresh:
            self._next = dict.fromkeys(self._next, 0.0)
        paths, known = self.plan.paths, self.of_runs
        ended = {run_id for run_id, state in known.items() if state.status in FINAL}
        active = {run_id: paths.run(run_id) for run_id in self.plan.runs if run_id not in ended}
        ordered = ordered_runs(paths, active)
        found, jobs = join(active, ordered, self._ask, all_jobs=False, here=self._cluster_name)
        self.of_runs |= found
        self.jobs |= jobs
        return {run_id: self.of_runs[run_id] for run_id in self.plan.runs}

    def under_way(self, fresh: bool = False) -> bool:
        """Look; whether a run waits or runs."""
        return any(state.status in UNDER_WAY for state in self.look(fresh).values())

    def row(self, run_id: str) -> dict[str, Any]:
        """State and progress of a run, and its job on Slurm."""
        paths, state, job = self.plan.paths.run(run_id), self.of_runs[run_id], self.jobs.get(run_id)
        at = progress(paths, self.plan.runs[run_id], state, job)
        row = {"run_id": run_id, **asdict(state), **asdict(at)}
        row["job_id"] = getattr(job, "job_id", None)
        slurm = ("state", "reason", "node_list")
        return row | {f"slurm_{name}": getattr(job, name, None) for name in slurm}

    def _cluster_name(self) -> str | None:
        """The name of the cluster that is asked; asked again until it has answered."""
        if self._cluster is None:
            self._cluster = slurm_jobs.cluster()
            self._note_silence("scontrol")
        return self._cluster

    def _note_silence(self, command: str) -> None:
        why = slurm_jobs.silent.get(command)
        self.silence = f"{command}: {why.removeprefix(f'{command}: ')}" if why else ""

    def _ask(self, ids: Iterable[str]) -> Mapping[str, slurm_jobs.Job]:
        """Return Slurm's latest answers; query it again after the interval."""
        now = time.monotonic()
        if now >= self._next["squeue"]:
            accounting = now >= self._next["sacct"]
            self._answers |= slurm_jobs.ask(ids, accounting)
            self._note_silence("squeue")
            self._next["squeue"] = now + SQUEUE_EVERY_S
            if accounting:
                self._next["sacct"] = now + SACCT_EVERY_S
        return self._answers


def wait_for_end(plan: Plan) -> bool:
    """Wait up to a minute until no run of the plan waits or runs; return whether none does."""
    looks, deadline = States(plan), time.monotonic() + _END_WAIT_S
    while looks.under_way(fresh=True):
        if time.monotonic() > deadline:
            return False
        time.sleep(_END_POLL_S)
    return True


def select(by_run: Mapping[str, RunState]) -> list[str]:
    """Return the runs to start: those missing or not ok."""
    return [r for r, state in by_run.items() if state.status not in ("ok", *UNDER_WAY)]


@dataclass(frozen=True)
class Progress:
    """The progress of a run's latest attempt. Times are in seconds; None: not known yet."""

    epoch: int  # epochs completed
    epochs: int  # planned; 0: the program decides
    val_loss: float | None
    val_accuracy: float | None
    elapsed_s: float | None  # since the start
    quiet_s: float | None  # of a running one: since it last wrote a line or a record
    step: float | None = None  # the last one that a program has recorded, until it is ok
    # Of all ranks, as the table of results has it: the mean of the steps after the warm-up, if all
    # ranks are as fast as the first one.
    rate: float | None = None
    unit: str = ""  # of the rate, as images

    @property
    def text(self) -> str:
        """The progress in one phrase; empty where nothing was recorded."""
        parts = []
        if self.epoch:
            parts += [f"epoch {self.epoch}/{self.epochs}" if self.epochs else f"epoch {self.epoch}"]
            parts += [] if self.val_loss is None else [f"loss {self.val_loss:.3f}"]
            parts += [] if self.val_accuracy is None else [f"accuracy {self.val_accuracy:.1%}"]
        elif self.step is not None:
            parts += [f"step {self.step:,.0f}"]
        if self.rate is not None:
            parts += [f"{self.rate:,.0f} {self.unit}/s"]
        return ", ".join(parts)


def progress(
    paths: RunPaths, spec: PlannedRun, state: RunState, job: slurm_jobs.Job | None = None
) -> Progress:
    """The progress of a run's newest attempt. job: what Slurm says of it."""
    records = _records(paths, state.attempt)
    epochs = [r for r in records if r.get("kind") == "epoch" and type(r.get("epoch")) is int]
    windows = [r for r in records if r.get("kind") == "window"]
    last = epochs[-1] if epochs else {}
    pairs = [(_number(r.get("timed_images")), _number(r.get("epoch_time_s"))) for r in epochs]
    rate, unit = _rate_of_steps(windows, records, spec)
    files = [paths.log, paths.metrics(state.attempt or 0)] if state.status == "running" else []
    if timed := [(images, s) for images, s in pairs if images is not None and s and s > 0]:
        rate, unit = sum(images for images, _ in timed) / sum(s for _, s in timed), "images"
    return Progress(
        epoch=last.get("epoch", -1) + 1,
        epochs=spec.planned_epochs or 0,
        val_loss=_number(last.get("val_loss")),
        val_accuracy=_number(last.get("val_accuracy")),
        elapsed_s=_elapsed_s(read_job(paths) or {}, state, job, records),
        quiet_s=written_ago_s(files),
        # Its last steps may have been profiled, and are in no window.
        step=_number(windows[-1].get("step")) if windows and state.status != "ok" else None,
        rate=rate,
        unit=unit if rate is not None else "",
    )


def _rate_of_steps(
    windows: list[Record], records: list[Record], spec: PlannedRun
) -> tuple[float | None, str]:
    """The mean rate after the warm-up and its unit, by the first rank's windows."""
    stated = getattr(spec, "work_per_step", None)
    work, wall_s = 0.0, 0.0
    for window in [w for w in windows if w.get("warmup") is not True] or windows:
        steps, took_s = _number(window.get("steps")), _number(window.get("wall_s"))
        part = _number(window.get("work"))
        if stated:
            part = None if steps is None else stated * steps / spec.world_size
        if part is not None and took_s is not None and took_s > 0:
            work, wall_s = work + part, wall_s + took_s
    if not wall_s:
        return None, ""
    recorded = next((str(r["unit"]) for r in records if r.get("unit")), None)
    # The spec of jobkit's own training states no unit: it works on images.
    unit = (None if stated else recorded) or getattr(spec, "unit", "images")
    return work / wall_s * spec.world_size, one_line(unit or "units")


def _elapsed_s(
    start: Mapping[str, Any], state: RunState, job: slurm_jobs.Job | None, records: list[Record]
) -> float | None:
    """Seconds since the start of a run, or from its start to its end; None before it has started.

    Of one that has ended by a clock that does not jump, where it was noted; of one that noted no
    end by Slurm's word, where the job is its own, else to its last record.
    """
    if start.get("ended") is not None and isinstance(known := start.get("elapsed_s"), int | float):
        return seconds(known)
    if not (started := seconds(start.get("started"))):
        return None
    end = seconds(start.get("ended"))
    if not end and state.status == "running":
        end = time.time()
    elif not end:
        if job and job.elapsed_s is not None and state.status in FINAL and not start.get("shared"):
            return job.elapsed_s
        end = seconds(records[-1].get("t")) if records else 0.0
    return max(0.0, end - started) if end else None


def _records(paths: RunPaths, attempt: int | None) -> list[Record]:
    """The last records of the attempt, of its first rank."""
    if attempt is None:
        return []
    try:
        with open_regular(paths.metrics(attempt), within=paths.folder.parent) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return [r for r in read_file(stream) if isinstance(r, dict)]
    except OSError:
        return []


def _number(value: object) -> float | None:
    """A number of a record; None where it is none, as somebody else may have written it."""
    return value if type(value) in (int, float) and abs(value) < _MAX_NUMBER else None  # type: ignore


def counted(count: int, noun: str) -> str:
    """A number of things in words: 1 run, 2 runs."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float | None) -> str:
    """Seconds as text: 47 s, 3 min 05 s, 2 h 10 min."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
