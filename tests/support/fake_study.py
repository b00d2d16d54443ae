"""Studies on disk for the tests: a real plan, and records by the real writer.

whole_study is small and without noise; realistic_study is as a cluster would leave it.
"""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobkit.paths import RunPaths, logs_root
from jobkit.program.lines import Writer
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study

logs = logs_root  # the folder of the studies
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
    images, images_per_s = TRAIN_SAMPLES, rate(spec)
    return {
        "epoch": epoch,
        "iterations": -(-images // spec.steps_batch_size),
        "train_loss": 2.0 / (epoch + 1),
        "val_loss": 2.1 / (epoch + 1) + 0.01 * spec.repeat,
        "val_accuracy": 1 - 0.8 / (epoch + 1),
        "epoch_time_s": images / images_per_s,
        "timed_images": images,
        "images_per_s": images_per_s,
        "eval_time_s": 0.5,
        "data_wait_s": 0.01 * images / images_per_s,
        "peak_memory_mib": 900.0 / (spec.world_size if spec.strategy == "fsdp" else 1) + epoch,
        "lr": 0.05,
    }


def start_fields(spec: RunSpec) -> dict[str, Any]:
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


Epoch = Callable[[RunSpec, int], dict[str, Any]]


class FakeRun:
    """One attempt of a run: writes what a payload would, to its files and to train.log."""

    def __init__(
        self, study: Path, run_id: str, spec: RunSpec, attempt: int = 0, epoch: Epoch = epoch_fields
    ) -> None:
        self.paths, self.spec, self.attempt = RunPaths(study / run_id), spec, attempt
        self._epoch = epoch
        (self.paths.attempts / str(attempt)).mkdir(parents=True)
        self._log = io.StringIO()
        self._names = {"study": study.name, "run_id": run_id, "attempt": attempt}
        path = self.paths.metrics(attempt)
        self.writer = Writer(**self._names, rank=0, path=path, log=self._log)

    def print(self, text: str) -> None:
        self._log.write(text + "\n")

    def begin(self, start: dict[str, Any] | None = None) -> "FakeRun":
        """Leave spec.json, run_start (with these fields, or the usual ones) and startup."""
        content = {"v": 1, **self._names, "spec": self.spec.to_dict()}
        del content["attempt"]
        self.paths.spec.write_text(json.dumps(content))
        self.writer.write("run_start", **(start or start_fields(self.spec)))
        self.writer.write("startup", total_s=4.5)
        return self

    def train(self, *epochs: int) -> "FakeRun":
        """Leave the records of these epochs, each with rank 0's window of its steps."""
        for epoch in epochs:
            fields = self._epoch(self.spec, epoch)
            steps, seconds, waited = (
                fields[k] for k in ("iterations", "epoch_time_s", "data_wait_s")
            )
            window = {"steps": steps, "wall_s": seconds, "data_wait_s": waited, "epoch": epoch}
            self.writer.write("window", step=(epoch + 1) * steps, **window)
            self.writer.write("epoch", **fields)
            self.print(f"epoch {epoch + 1}: fine")
        return self

    def end(self, status: str = "ok", reason: str = "", exit_code: int = 0) -> "FakeRun":
        """Leave run_end and the outcome, and close the files."""
        last = self._epoch(self.spec, self.spec.epochs - 1)
        final = {k: last[k] for k in ("val_loss", "val_accuracy")} if status == "ok" else {}
        self.writer.write("run_end", status=status, reason=reason, total_time_s=30.0, **final)
        content = {"exit_code": exit_code, "status": status, "reason": reason}
        self.paths.outcome(self.attempt).write_text(json.dumps(content))
        return self.flush()

    def flush(self) -> "FakeRun":
        with self.paths.log.open("a") as log:
            log.write(self._log.getvalue())
        self._log.seek(0)
        self._log.truncate()
        return self

    def why(self, records: Sequence[dict[str, Any]]) -> None:
        for rank, fields in enumerate(records):
            path = self.paths.metrics_of_rank(self.attempt, rank, "w")
            writer = Writer(**self._names, rank=rank, path=path, log=None)
            writer.write("why", **fields)
            writer.close()


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


# A study as a cluster would leave it: three strategies, noise, a run out of memory. Compute shrinks
# with the ranks, an all-reduce does not, and nodes have four GPUs.

SAMPLES = 1_281_167
# Seconds of an iteration: communication of two ranks, overhead; how uneven the ranks' compute is.
MACHINE = {"ddp": (0.011, 0.004, 0.01), "fsdp": (0.021, 0.009, 0.01), "pp": (0.016, 0.006, 0.12)}


def profiled(
    compute: Sequence[float],
    data_wait: Sequence[float] = (),
    host: Sequence[float] = (),
    communication: float = 0.0,
    steps: int = 5,
) -> list[dict[str, Any]]:
    """The fields of each rank's why record from what it spends, in seconds of a step.

    A step has one collective, which ends on all ranks together: who is done early waits inside.
    """
    data_wait, host = data_wait or [0.0] * len(compute), host or [0.0] * len(compute)
    busy = [sum(parts) for parts in zip(compute, data_wait, host, strict=True)]
    wall = max(busy) + communication
    found = []
    for rank, own in enumerate(busy):
        parts = [wall, compute[rank], wall - own, data_wait[rank], host[rank]]
        spans = [
            [round(1e6 * (j * wall + own)), round(1e6 * (wall - own))]
            for j in range(steps if wall > own else 0)
        ]
        fields = {"step": 20, "steps": steps, "host": f"node{rank // 4}", "gpu": False}
        fields |= {"parts": [parts] * steps, "exposed": [[b, b + length] for b, length in spans]}
        fields["collectives"] = [[j, "gloo:all_reduce", *span] for j, span in enumerate(spans)]
        found.append(fields)
    return found


def made_up_step(spec: RunSpec) -> list[dict[str, Any]]:
    """What an iteration of a run takes, always the same for the same spec."""
    n, chance = spec.world_size, random.Random(f"{spec.strategy} {spec.world_size} {spec.repeat}")
    communication, overhead, bubble = MACHINE[spec.strategy]
    compute = [2.9 / n * (1 + bubble * (n > 1) * chance.random()) for _ in range(n)]
    other = [overhead * (1 + 0.1 * chance.random()) for _ in range(n)]
    waits = [0.002 + 0.0015 * chance.random() * spec.nodes for _ in range(n)]
    exposed = communication * (2 * (n - 1) / n) * (1 + 0.25 * spec.nodes**0.5)
    return profiled(compute, waits, other, exposed)


def _epoch(spec: RunSpec, epoch: int) -> dict[str, Any]:
    batch, made = spec.steps_batch_size, made_up_step(spec)
    chance = random.Random(f"{spec.strategy} {spec.world_size} {spec.repeat} {epoch}")
    step = made[0]["parts"][0][0] * (1 + 0.01 * chance.random())
    iterations = SAMPLES // batch
    return epoch_fields(spec, epoch) | {
        "iterations": iterations,
        "epoch_time_s": iterations * step,
        "timed_images": iterations * batch,
        "images_per_s": batch / step,
        "data_wait_s": iterations * sum(r["parts"][0][3] for r in made) / len(made),
    }


SIZES = (1, 2, 4, "2x4", "4x4", "8x4", "16x4")


def realistic_study(sizes: Sequence[int | str] = SIZES, repeats: int = 3, name: str = "s") -> Plan:
    """A study of 63 runs under $JOBKIT_LOGS; one of them on a single rank is out of memory."""
    settings = {"model": "resnet18", "precision": "bf16", "epochs": 8, "global_batch_size": 2048}
    plan = make_plan(
        name, strategies=tuple(MACHINE), gpus=sizes, repeats=repeats, settings=settings
    )
    for run_id, spec in plan.runs.items():
        start = start_fields(spec) | {"device": "NVIDIA H100 80GB HBM3", "device_type": "cuda"}
        start |= {"train_samples": SAMPLES, "backend": "nccl"}
        start |= {"node_list": ",".join(f"node{i}" for i in range(spec.nodes))}
        run = FakeRun(plan.paths.folder, run_id, spec, epoch=_epoch).begin(start)
        if (spec.strategy, spec.world_size, spec.repeat) == ("pp", 1, 2):
            run.end("failed", "rank 0: torch.OutOfMemoryError: CUDA out of memory", 1)
        else:
            run.why(made_up_step(spec))
            run.train(*range(spec.epochs)).end()
    return plan
