"""The progress of a run, read from its metrics file."""

import math
import os
import time
from dataclasses import dataclass
from typing import Any

from jobkit.errors import one_line
from jobkit.metric.kinds import Record
from jobkit.metric.reader import read_file
from jobkit.outcome.logs import open_log
from jobkit.outcome.state import read_job, seconds
from jobkit.paths import RunPaths
from jobkit.processes import age_s
from jobkit.spec.runspec import PlannedRun

_TAIL_BYTES = 32 << 10
_TOO_LARGE = 1e30  # to be shown


@dataclass(frozen=True)
class Progress:
    """The progress of a run's latest attempt. Times are in seconds; None: not known yet."""

    epoch: int  # epochs completed
    epochs: int  # planned; 0: the program decides
    val_loss: float | None
    val_accuracy: float | None
    images_per_s: float | None
    elapsed_s: float | None  # since the start
    left_s: float | None  # estimate, from the last epoch
    steps: str = ""  # of a program that records steps: the last one, and the rate

    @property
    def done(self) -> str:
        """What a run that has ended recorded of its progress; empty where that is nothing."""
        return self.text if self.epoch or self.steps else ""

    @property
    def text(self) -> str:
        """The progress in one phrase."""
        if not self.epoch:
            return self.steps or ("starting" if self.epochs else "started")
        parts = [f"epoch {self.epoch}/{self.epochs}" if self.epochs else f"epoch {self.epoch}"]
        if self.val_loss is not None:
            parts.append(f"loss {self.val_loss:.3f}")
        if self.val_accuracy is not None:
            parts.append(f"accuracy {self.val_accuracy:.1%}")
        if self.images_per_s is not None:
            parts.append(f"{self.images_per_s:,.0f} images/s")
        return ", ".join(parts)


def progress(paths: RunPaths, spec: PlannedRun, attempt: int | None) -> Progress:
    """The progress of an attempt."""
    records = _records(paths, attempt)
    epochs = [r for r in records if r.get("kind") == "epoch" and type(r.get("epoch")) is int]
    job = read_job(paths) or {}
    last, planned = epochs[-1] if epochs else {}, spec.planned_epochs or 0
    done = last.get("epoch", -1) + 1
    return Progress(
        epoch=done,
        epochs=planned,
        val_loss=_number(last.get("val_loss")),
        val_accuracy=_number(last.get("val_accuracy")),
        images_per_s=_number(last.get("images_per_s")),
        elapsed_s=_elapsed_s(job),
        left_s=_left_s(last, planned - done) if planned else None,
        steps=_steps(records, spec),
    )


def _elapsed_s(job: dict[str, Any]) -> float | None:
    """Seconds since the start of a job, or from its start to its end; None before it has started.

    The clock is asked only where nothing else knows: it may have jumped, or be another machine's.
    """
    started, ended = seconds(job.get("started")), seconds(job.get("ended"))
    known = job.get("elapsed_s") if job.get("ended") is not None else age_s(job)
    if isinstance(known, int | float):
        return seconds(known)
    return max(0.0, (ended or time.time()) - started) if started else None


def _steps(records: list[Record], spec: PlannedRun) -> str:
    """The last step that the first rank recorded, and the rate if all ranks are as fast."""
    last = next((r for r in reversed(records) if r.get("kind") == "window"), {})
    step, work, wall_s = (_number(last.get(name)) for name in ("step", "work", "wall_s"))
    if step is None:
        return ""
    text = f"step {step:,.0f}"
    if work is None or not wall_s or wall_s < 0:
        return text
    unit = next((str(r["unit"]) for r in records if r.get("unit")), getattr(spec, "unit", None))
    return f"{text}, {work / wall_s * spec.world_size:,.0f} {one_line(unit or 'units')}/s"


def load(paths: RunPaths, attempt: int | None) -> str:
    """Load and memory in use of the first rank's machine, and the power since the last sample."""
    samples, parts = _records(paths, attempt, samples=True), []
    last = samples[-1] if samples else {}
    for name, memory, what in (
        ("gpu_busy", "gpu_memory_mib", "GPU"),
        ("cpu_busy", "memory_mib", "CPU"),
    ):
        share, mib = _number(last.get(name)), _number(last.get(memory))
        words = [] if share is None else [f"{share:.0%}"]
        words += [] if mib is None else [f"{mib / 1024:,.1f} GiB"]
        if words:
            parts.append(" ".join([what, *words]))
    before = samples[-2] if len(samples) > 1 else {}
    for scope in ("node", "gpu"):
        names = (f"energy_{scope}_j", "at_s")
        values = [_number(r.get(name)) for name in names for r in (before, last)]
        e0, e1, t0, t1 = values
        if e0 is not None and e1 is not None and t0 is not None and t1 is not None and t1 > t0:
            parts.append(f"{(e1 - e0) / (t1 - t0):,.0f} W ({scope})")
    return ", ".join(parts)


def _records(paths: RunPaths, attempt: int | None, samples: bool = False) -> list[Record]:
    """The last records of the attempt, of its first rank, or its samples."""
    if attempt is None:
        return []
    try:
        path = paths.metrics_of_rank(attempt, 0, "s") if samples else paths.metrics(attempt)
        with open_log(path, paths.folder.parent, None) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return [r for r in read_file(stream) if isinstance(r, dict)]
    except OSError:
        return []


def _left_s(last: Record, epochs: int) -> float | None:
    """Seconds until the end, if all epochs take as long as the last one."""
    try:
        epoch_s = last["epoch_time_s"] + last["eval_time_s"]
        # Of another machine's clock it may be below 0, and after a jump any number.
        left = max(0.0, epoch_s * epochs - min(max(0.0, _age_s(last)), epoch_s))
        return left if math.isfinite(left) else None
    except (KeyError, TypeError, OverflowError):  # not yet, or not measured
        return None


def _age_s(record: Record) -> float:
    return time.time() - record["t"]


def _number(value: object) -> float | None:
    """A number of a record; None where it is none, as somebody else may have written it."""
    return value if type(value) in (int, float) and abs(value) < _TOO_LARGE else None  # type: ignore


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
