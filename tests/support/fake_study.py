"""Studies on disk for the tests: a real plan, and records by the real writer."""

import io
import json
from pathlib import Path
from typing import Any

from jobkit.metric.line import MetricWriter
from jobkit.paths import RunPaths, logs_root
from jobkit.spec.plan import Plan, Study
from jobkit.spec.runspec import RunSpec

TRAIN_SAMPLES = 8192
RATE = {"single": 1000.0, "ddp": 1000.0, "fsdp": 800.0, "pp": 900.0}


def make_plan(name: str = "s", **fields: Any) -> Plan:
    """A saved plan under $JOBKIT_LOGS."""
    settings = {"dataset": "synthetic", "train_samples": TRAIN_SAMPLES, "epochs": 3}
    settings |= fields.pop("settings", {})
    plan = Study(name=name, settings=settings, **fields).expand()
    plan.save()
    return plan


def rate(spec: RunSpec) -> float:
    """Images a second of a made-up run: each rank adds nine tenths of one."""
    return RATE[spec.strategy] * (1 + 0.9 * (spec.world_size - 1)) * (1 + 0.02 * spec.repeat)


def epoch_fields(spec: RunSpec, epoch: int) -> dict[str, Any]:
    """The fields of an epoch's record; the first one is slow, as a real one may be."""
    images = TRAIN_SAMPLES - (2048 if epoch == 0 else 0)
    images_per_s = rate(spec) * (0.5 if epoch == 0 else 1)
    return {
        "epoch": epoch,
        "iterations": 32,
        "train_loss": 2.0 / (epoch + 1),
        "val_loss": 2.1 / (epoch + 1) + 0.01 * spec.repeat,
        "val_accuracy": 1 - 0.8 / (epoch + 1),
        "epoch_time_s": images / images_per_s,
        "timed_images": images,
        "images_per_s": images_per_s,
        "eval_time_s": 0.5,
        "data_wait_s": 0.01 * images / images_per_s,
        "peak_memory_mib": 900.0 / (spec.world_size if spec.strategy == "fsdp" else 1) + epoch,
        "reserved_memory_mib": None,
        "lr": 0.05,
    }


def start_fields(spec: RunSpec) -> dict[str, Any]:
    """The fields of run_start."""
    return {
        "spec": spec.differences(),
        "world_size": spec.world_size,
        "nodes": spec.nodes,
        "node_list": "node0",
        "device": "Some Processor",
        "device_type": "cpu",
        "backend": "gloo",
        "versions": {"python": "3.11.7", "torch": "2.11.0"},
        "git_commit": "0" * 40,
        "job_id": None,
        "global_batch_size": spec.steps_batch_size,
        "batch_size_per_rank": spec.steps_batch_size // spec.world_size,
        "train_samples": TRAIN_SAMPLES,
        "test_samples": 2000,
        "parameters": 620362,
        "threads": 1,
    }


class FakeRun:
    """One attempt of a run: writes what a payload would, to its files and to train.log."""

    def __init__(self, study: Path, run_id: str, spec: RunSpec, attempt: int = 0) -> None:
        self.paths, self.spec, self.attempt = RunPaths(study / run_id), spec, attempt
        (self.paths.attempts / str(attempt)).mkdir(parents=True)
        self._log = io.StringIO()
        self.writer = MetricWriter(
            study=study.name,
            run_id=run_id,
            attempt=attempt,
            rank=0,
            path=self.paths.metrics(attempt),
            log=self._log,
        )

    def print(self, text: str) -> None:
        """Print a line of other text into the log."""
        self._log.write(text + "\n")

    def begin(self, start: dict[str, Any] | None = None, loaded: int | None = None) -> "FakeRun":
        """Leave spec.json, run_start (with these fields, or the usual ones) and startup.

        loaded: the epoch with which it goes on, from a checkpoint of an earlier attempt.
        """
        head = {"v": 1, "study": self.paths.folder.parent.name, "run_id": self.paths.folder.name}
        self.paths.spec.write_text(json.dumps({**head, "spec": self.spec.to_dict()}))
        self.writer.write("run_start", **(start or start_fields(self.spec)))
        if loaded is not None:
            self.writer.write("checkpoint", action="loaded", iteration=5 * loaded, epoch=loaded)
        self.writer.write("startup", total_s=4.5)
        return self

    def train(self, *epochs: int) -> "FakeRun":
        """Leave the records of these epochs."""
        for epoch in epochs:
            self.writer.write("epoch", **epoch_fields(self.spec, epoch))
            self.print(f"epoch {epoch + 1}: fine")
        return self

    def end(self, status: str = "ok", reason: str = "", exit_code: int = 0) -> "FakeRun":
        """Leave run_end and the outcome, and close the files."""
        last = epoch_fields(self.spec, self.spec.epochs - 1)
        final = {k: last[k] for k in ("val_loss", "val_accuracy")} if status == "ok" else {}
        self.writer.write("run_end", status=status, reason=reason, total_time_s=30.0, **final)
        self.outcome(status, reason, exit_code)
        return self.flush()

    def outcome(self, status: str, reason: str, exit_code: int) -> None:
        """Leave the outcome that the payload leaves."""
        content = {"exit_code": exit_code, "status": status, "reason": reason}
        self.paths.outcome(self.attempt).write_text(json.dumps(content))

    def flush(self) -> "FakeRun":
        """Append all that was printed to train.log."""
        with self.paths.log.open("a") as log:
            log.write(self._log.getvalue())
        self._log.seek(0)
        self._log.truncate()
        return self


def whole_run(plan: Plan, run_id: str) -> FakeRun:
    """A run of the plan that went well."""
    spec = plan.runs[run_id]
    run = FakeRun(plan.paths.folder, run_id, spec).begin().train(*range(spec.epochs))
    return run.end()


def whole_study(name: str = "s", **fields: Any) -> Plan:
    """A study under $JOBKIT_LOGS of which every run went well."""
    plan = make_plan(name, **fields)
    for run_id in plan.runs:
        whole_run(plan, run_id)
    return plan


def logs() -> Path:
    """The folder of the studies."""
    return logs_root()
