"""A study as a cluster would leave it: 1 to 64 GPUs, three strategies, noise, a run out of memory.

The numbers follow a simple machine: compute that shrinks with the ranks, an all-reduce that does
not, some wait for data, and nodes of four GPUs.
"""

import random
from collections.abc import Sequence
from typing import Any

from jobkit.spec.plan import Plan
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun, make_plan, start_fields

SAMPLES = 1_281_167
SIZES = (1, 2, 4, "2x4", "4x4", "8x4", "16x4")
_COMMUNICATION = {"ddp": 0.011, "fsdp": 0.021, "pp": 0.016}  # seconds an iteration, two ranks
_OVERHEAD = {"ddp": 0.004, "fsdp": 0.009, "pp": 0.006}
_BUBBLE = {"ddp": 0.01, "fsdp": 0.01, "pp": 0.12}  # how uneven the ranks' compute is


def step_fields(
    compute: Sequence[float],
    data_wait: Sequence[float] = (),
    other: Sequence[float] = (),
    communication: float = 0.0,
) -> dict[str, float]:
    """The fields of a breakdown record from what each rank spends, in seconds an iteration.

    The iteration ends on all ranks together: who is done early waits inside its communication.
    """
    n = len(compute)
    data_wait, other = data_wait or [0.0] * n, other or [0.0] * n
    useful = [c + o for c, o in zip(compute, other, strict=True)]
    busy = [u + d for u, d in zip(useful, data_wait, strict=True)]
    wall = max(busy) + communication
    return {
        "compute_s": sum(compute) / n,
        "communication_s": sum(wall - b for b in busy) / n,
        "data_wait_s": sum(data_wait) / n,
        "other_s": sum(other) / n,
        "iteration_s": wall,
        "useful_max_s": max(useful),
        "busy_max_s": max(busy),
        "iterations": 100,
        "random_imbalance_s": 0.0,
        "last_rank_wait_s": 0.0,
        "communication_direct_s": sum(wall - b for b in busy) / n,
        "certain": True,
    }


def made_up_step(spec: RunSpec) -> dict[str, float]:
    """What an iteration of a run takes, always the same for the same spec."""
    n, chance = spec.world_size, random.Random(f"{spec.strategy} {spec.world_size} {spec.repeat}")
    own = 2.9 / n if spec.scaling == "strong" else 0.18
    uneven = _BUBBLE[spec.strategy] if n > 1 else 0.0
    compute = [own * (1 + uneven * chance.random()) for _ in range(n)]
    other = [_OVERHEAD[spec.strategy] * (1 + 0.1 * chance.random()) for _ in range(n)]
    waits = [0.002 + 0.0015 * chance.random() * spec.nodes for _ in range(n)]
    exposed = _COMMUNICATION[spec.strategy] * (2 * (n - 1) / n) * (1 + 0.25 * spec.nodes**0.5)
    return step_fields(compute, waits, other, exposed if n > 1 else 0.0)


def _held_memory(spec: RunSpec) -> float:
    """MiB of parameters, gradients and optimizer state of a rank."""
    n = spec.world_size
    return 14_000 * {"ddp": 1.0, "pp": 2 / (1 + n), "fsdp": 1 / n}[spec.strategy]


def _epoch(spec: RunSpec, epoch: int) -> dict[str, Any]:
    """An epoch's record; large global batches learn less from it."""
    chance = random.Random(f"{spec.strategy} {spec.world_size} {spec.repeat} {epoch}")
    batch = spec.steps_batch_size
    step = made_up_step(spec)["iteration_s"] * (1 + 0.01 * chance.random())
    iterations = SAMPLES // batch
    progress = (epoch + 1) / (1 + batch / 40_000)
    loss = 0.9 + 5.5 / (1 + 0.9 * progress) + 0.02 * chance.random()
    held = _held_memory(spec)
    memory = held + 90_000 * batch / spec.world_size / 2048
    return {
        "epoch": epoch,
        "iterations": iterations,
        "train_loss": loss - 0.1,
        "val_loss": loss,
        "val_accuracy": 1 - loss / 7.2,
        "epoch_time_s": iterations * step,
        "timed_images": iterations * batch,
        "images_per_s": batch / step,
        "eval_time_s": 3.0,
        "data_wait_s": iterations * made_up_step(spec)["data_wait_s"],
        "peak_memory_mib": memory,
        "reserved_memory_mib": memory * 1.1,
        "held_memory_mib": held * 1.01,
        "lr": 0.1,
    }


def _start(spec: RunSpec) -> dict[str, Any]:
    on_gpu = {"device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "backend": "nccl"}
    hosts = ",".join(f"node{i}" for i in range(spec.nodes))
    sizes = {"train_samples": SAMPLES, "test_samples": 50_000, "node_list": hosts}
    return start_fields(spec) | on_gpu | sizes | {"predicted_memory_mib": _held_memory(spec)}


def leave_run(plan: Plan, run_id: str) -> None:
    """A run of the plan; one on a single rank is out of memory."""
    spec = plan.runs[run_id]
    run = FakeRun(plan.paths.folder, run_id, spec)
    run.begin(_start(spec))
    if (spec.strategy, spec.world_size, spec.repeat) == ("pp", 1, 2):
        reason = "rank 0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
        run.end("failed", reason, 1)
        return
    run.writer.write("breakdown", **made_up_step(spec))
    for epoch in range(spec.epochs):
        run.writer.write("epoch", **_epoch(spec, epoch))
    last = _epoch(spec, spec.epochs - 1)
    final = {k: last[k] for k in ("val_loss", "val_accuracy")}
    run.writer.write("run_end", status="ok", reason="", total_time_s=900.0, **final)
    run.outcome("ok", "", 0)
    run.flush()


def realistic_study(
    name: str = "scaling", sizes: Sequence[int | str] = SIZES, repeats: int = 3, **settings: Any
) -> Plan:
    """The study under $JOBKIT_LOGS; strong scaling unless batch_size_per_rank is given."""
    batch = {} if "batch_size_per_rank" in settings else {"global_batch_size": 2048}
    settings = {"model": "resnet18", "precision": "bf16", "epochs": 8} | batch | settings
    strategies = ("ddp", "fsdp", "pp")
    plan = make_plan(name, strategies=strategies, gpus=sizes, repeats=repeats, settings=settings)
    for run_id in plan.runs:
        leave_run(plan, run_id)
    return plan
