"""A rank of the GPU check: training steps that never wait for the GPU, and the GPU's own speed.

    torchrun --nproc-per-node 2 -m jobkit.checks.gpu_check.step OUT.json [--device cuda]

In a measured epoch torch raises an error where an operation has the host wait for the GPU
(torch.cuda.set_sync_debug_mode). It does not see waits inside of NCCL.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jobkit.errors import one_line
from jobkit.paths import write_json
from jobkit.payload import host, numerics
from jobkit.payload.data.batches import Step
from jobkit.payload.data.cache import Dataset
from jobkit.payload.data.sources import synthetic
from jobkit.payload.distributed import Group, join
from jobkit.payload.leaving import leave
from jobkit.payload.place import read_rank_env
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec

_TIMES = 10  # of a measured operation, after one that is not


@dataclass
class Observed:
    """Whether the steps of an epoch wait for the GPU, and how long the host issues them."""

    device: torch.device
    steps: int  # of an epoch
    seen: int = 0
    begun: float = 0.0
    issue_s: float = float("nan")  # from before the first step to after the last, without a wait
    waits: list[str] = field(default_factory=list)

    def wants(self, trainer: Trainer) -> bool:
        """Every step."""
        return True

    def before(self, trainer: Trainer, step: Step) -> None:
        """Before the first step: from here on nothing may wait."""
        if self.seen == 0:
            self.begun = time.perf_counter()
            sync_debug(self.device, "error")

    def after(self, trainer: Trainer, step: Step) -> None:
        """After the last one: the epoch's end may."""
        self.seen += 1
        if self.seen == self.steps:
            sync_debug(self.device, "default")
            self.issue_s = time.perf_counter() - self.begun


def sync_debug(device: torch.device, mode: str) -> None:
    """Set what torch does where the host waits for the GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def steps(spec: RunSpec, group: Group) -> dict[str, Any]:
    """Return what an epoch of a training did, after an epoch of warm-up."""
    train, test, classes = synthetic(spec.train_samples or 0, spec.test_samples or 0)
    numerics.configure(spec, group.device)
    report = Reporter(None, 0, 1)  # as a rank that prints nothing
    trainer = build_trainer(spec, group, Dataset(train, test, classes), report)
    trainer.train_epoch(0, lambda _: None)
    host.reset_peak_memory(group.device)
    seen = Observed(group.device, len(trainer.batches))
    trainer.observers = [seen]
    found: dict[str, Any] = {"strategy": spec.strategy, "precision": spec.precision}
    try:
        clock, _, _ = trainer.train_epoch(1, lambda _: None)
        found |= {"step_s": clock.elapsed_s() / seen.steps, "issue_s": seen.issue_s / seen.steps}
        found |= {"images_per_s": clock.images / clock.elapsed_s()}
        found |= {"data_wait_share": clock.data_wait_s / clock.elapsed_s()}
        found["peak_allocated_mib"] = host.peak_memory_mib(group.device).allocated
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        found["waits"] = f"{one_line(str(error))[:200]} at {_own_place(error)}"
    finally:
        sync_debug(group.device, "default")
        report.close()
    return found


def _own_place(error: BaseException) -> str:
    """Return the innermost place of an error in this project."""
    where, at = "?", error.__traceback__
    while at:
        name = at.tb_frame.f_code.co_filename
        if "jobkit" in name:
            where = f"{Path(name).name}:{at.tb_lineno}"
        at = at.tb_next
    return where


def seconds(device: torch.device, act: Callable[[], Any]) -> float:
    """Return the seconds of one of several calls in a row, the device synchronised around them."""
    act()
    start = _now(device)
    for _ in range(_TIMES):
        act()
    return (_now(device) - start) / _TIMES


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def speeds(device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of matrix products, GB/s of copies, and the error of fp32 products."""
    size, mib = (8192, 1024) if device.type == "cuda" else (256, 8)
    found: dict[str, float] = {}
    for kind in ("fp32", "tf32", "bf16"):
        numerics.configure(RunSpec(fp32="tf32" if kind == "tf32" else "ieee"), device)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        one = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(one)
        taken = seconds(device, lambda one=one, out=out: torch.mm(one, one, out=out))  # type: ignore[misc]
        found[f"{kind}_tflops"] = 2 * size**3 / taken / 1e12
        if kind != "bf16":
            part = one[:512, :512]
            right = part.double() @ part.double()
            off = ((part @ part).double() - right).abs().max() / right.abs().max()
            found[f"{kind}_error"] = float(off)
        del one, out
    source = torch.ones(mib * 2**18, device=device)
    target = torch.empty_like(source)
    # Each byte is read and written.
    found["memory_gb_per_s"] = 2 * mib * 2**20 / seconds(device, lambda: target.copy_(source)) / 1e9
    if device.type == "cuda":
        pinned = torch.empty(mib * 2**17, pin_memory=True)
        half = target[: len(pinned)]
        taken = seconds(device, lambda: half.copy_(pinned, non_blocking=True))
        found["from_host_gb_per_s"] = mib * 2**19 / taken / 1e9
    return found


def specs(device: str, ranks: int) -> list[RunSpec]:
    """Return the trainings whose steps are observed: none of them reads anything back."""
    small = device == "cpu"
    common: dict[str, Any] = {
        "dataset": "synthetic", "device": device, "model": "mlp" if small else "resnet18",
        "train_samples": 256 if small else 10240, "test_samples": 10, "ranks_per_node": ranks,
        "global_batch_size": 64 if small else 1024, "warmup_iterations": 0,
    }  # fmt: skip
    alone = ("single",) if ranks == 1 else ()
    cases = [(s, p) for s in (*alone, "ddp", "fsdp") for p in ("fp32", "bf16")]
    made = [RunSpec(**common, strategy=s, precision=p) for s, p in (cases[:1] if small else cases)]
    return [*made, *([] if small else [RunSpec(**{**common, "model": "cnn"}, strategy="ddp")])]


def main(argv: Sequence[str]) -> int:
    """Measure as one rank; rank 0 writes the file."""
    parser = argparse.ArgumentParser(prog="python -m jobkit.checks.gpu_check.step")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    place = read_rank_env()
    group = join(args.device, place, 120.0)
    device = group.device
    found: dict[str, Any] = {"device": host.device_name(device), "versions": host.versions(device)}
    found["versions"] |= host.gpu_state(device)
    found["speeds"] = speeds(device)
    found["steps"] = []
    for spec in specs(args.device, place.world_size):
        own = steps(spec, group) | {"model": spec.model}
        # One rank that waited is enough.
        waits = [one.get("waits") for one in group.gather(own) if one.get("waits")]
        found["steps"].append(own | {"waits": waits[0] if waits else ""})
        if place.rank == 0:
            write_json(args.out, found)
    group.close()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
