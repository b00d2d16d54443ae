"""What hpc/gpu-check.sh measures itself: an epoch in which no step may wait for the GPU.

    torchrun --nproc-per-node 4 -m jobkit.checks.gpu

Prints one line per number with its bound, and ends with 4 where a number is outside of it.
"""

import math
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from jobkit.data.images import synthetic
from jobkit.errors import Exit, Parser, command, one_line
from jobkit.payload.batches import Step
from jobkit.payload.device import configure, peak_memory_mib
from jobkit.payload.distributed import Group, join
from jobkit.payload.main import leave
from jobkit.payload.place import read_rank_env
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.planner.footprint import Subject, footprint
from jobkit.spec.runspec import RunSpec

MAX_ISSUE_SHARE = 0.7  # chosen; above it the host limits the rate, not the GPU
PREDICTED = (0.8, 1.25)  # chosen; on the CPU the prediction is within 10 %


def sync_debug(device: torch.device, mode: str) -> None:
    """Set what torch does where the host waits for the GPU. On a CPU there is nothing to set."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def line(
    name: str, value: float, low: float = -math.inf, high: float = math.inf, why: str = ""
) -> str:
    """Return a number for people, with its bounds; MISSED: it is outside of them, as NaN is."""
    ends = {"at least": low, "at most": high}
    bounds = ", ".join(f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end))
    text = f"{'ok' if low <= value <= high else 'MISSED':<7}{name}: {value:.4g}"
    return text + f" ({bounds})" * bool(bounds) + f"; {why}" * bool(why)


def epoch(spec: RunSpec, group: Group) -> list[str]:
    """Train two epochs, the second one without waits, and return its numbers, one line each."""
    device, name = group.device, f"{spec.model} {spec.strategy}"
    data = synthetic(spec.train_samples or 0, spec.test_samples or 0)
    configure(spec, device)
    report = Reporter(None, 0, 1)  # prints nothing, and has no file to close
    trainer = build_trainer(spec, group, data, report)
    trainer.train_epoch(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    moments: list[float] = []  # before and after each step

    # From the first step to the last one torch raises an error where the host waits for the GPU.
    # The end of an epoch may wait: it reads its sums.
    def before(trainer: Trainer, step: Step) -> None:
        moments.append(time.perf_counter())
        if len(moments) == 1:
            sync_debug(device, "error")

    def after(trainer: Trainer, step: Step) -> None:
        if len(moments) + 1 == 2 * len(trainer.batches):
            sync_debug(device, "default")
        moments.append(time.perf_counter())

    trainer.before_step, trainer.after_step = [before], [after]
    waits = ""
    try:
        trainer.train_epoch(1)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        place = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "jobkit" in f.filename]
        waits = f"rank {group.place.rank}: {one_line(str(error))[:120]} at {place[-1]}"
    finally:
        sync_debug(device, "default")
    # All ranks say so; else those that go on would wait for one that has stopped.
    waits = next(filter(None, group.gather(waits)), "")
    lines = [line(f"{name}: steps that wait for the GPU", bool(waits), high=0, why=waits)]
    if waits:
        return lines
    elapsed_s = trainer.windows.epoch_s
    lines.append(line(f"{name}: images/s of this rank", trainer.windows.images / elapsed_s))
    if device.type == "cuda":
        # Of the first two steps: later the host waits where many launches are pending.
        share = (moments[3] - moments[0]) / 2 * len(trainer.batches) / elapsed_s
        peak_mib = peak_memory_mib(device)["allocated_memory_mib"]
        issues = f"{name}: share of the time in which the host issues work"
        lines.append(line(issues, share, high=MAX_ISSUE_SHARE))
        images = len(data.train.labels) + len(data.test.labels)
        predicted = footprint(spec, Subject(classes=len(data.classes), images=images)).total
        ratio, why = predicted / 2**20 / peak_mib, f"{peak_mib:.0f} MiB measured"
        lines.append(line(f"{name}: memory predicted / measured", ratio, *PREDICTED, why))
    return lines


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m jobkit.checks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args, place = parser.parse_args(argv), read_rank_env()
    small = args.device == "cpu"  # a rehearsal
    spec = RunSpec(
        dataset="synthetic", device=args.device, strategy="ddp",
        model="mlp" if small else "resnet18", precision="fp32" if small else "bf16",
        train_samples=256 if small else 10240, test_samples=10,
        global_batch_size=64 if small else 1024,
        warmup_iterations=0, ranks_per_node=place.world_size,
    )  # fmt: skip
    group = join(args.device, place, 120.0)
    lines = epoch(spec, group)
    group.close()
    if place.rank != 0:
        return Exit.OK
    print("\n".join(lines), flush=True)
    return Exit.THRESHOLD if any(text.startswith("MISSED") for text in lines) else Exit.OK


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
