"""The progress of a run, read from its metrics file."""

import time
from dataclasses import dataclass

from jobkit.metric.line import Record
from jobkit.metric.reader import read_file
from jobkit.outcome.facts import read_job
from jobkit.paths import RunPaths
from jobkit.spec.planned import PlannedRun

_TAIL_BYTES = 32 << 10


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

    @property
    def text(self) -> str:
        """The progress in one phrase."""
        if not self.epoch:
            return "starting" if self.epochs else "started"
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
    epochs = _epochs(paths, attempt)
    job = read_job(paths) or {}
    started, last = job.get("started"), epochs[-1] if epochs else {}
    elapsed = None if started is None else max(0.0, (job.get("ended") or time.time()) - started)
    done, planned = last.get("epoch", -1) + 1, spec.planned_epochs or 0
    return Progress(
        epoch=done,
        epochs=planned,
        val_loss=last.get("val_loss"),
        val_accuracy=last.get("val_accuracy"),
        images_per_s=last.get("images_per_s"),
        elapsed_s=elapsed,
        left_s=_left_s(last, planned - done) if planned else None,
    )


def _epochs(paths: RunPaths, attempt: int | None) -> list[Record]:
    """The last epoch records of the attempt."""
    if attempt is None or not (path := paths.metrics(attempt)).is_file():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        found = [r for r in read_file(stream) if isinstance(r, dict)]
    return [r for r in found if r.get("kind") == "epoch" and type(r.get("epoch")) is int]


def _left_s(last: Record, epochs: int) -> float | None:
    """Seconds until the end, if all epochs take as long as the last one."""
    try:
        return max(0.0, (last["epoch_time_s"] + last["eval_time_s"]) * epochs - _age_s(last))
    except (KeyError, TypeError):  # not yet, or not measured
        return None


def _age_s(record: Record) -> float:
    return time.time() - record["t"]


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
