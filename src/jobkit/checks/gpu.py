"""What hpc/gpu-check.sh measures itself: the environment of a node, and epochs on its GPUs.

    python -m jobkit.checks.gpu environment
    torchrun --nproc-per-node 4 -m jobkit.checks.gpu epoch

Prints one line per number with its bound. Ends with 4 where a number is outside of its bound, and
with 2 and the fix where nothing else could run.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobkit.checks.preflight.judge import MIN_CORES_PER_GPU, runs_on
from jobkit.errors import Exit, Parser, UsageError, command, one_line
from jobkit.payload.batches import Step
from jobkit.payload.data import synthetic
from jobkit.payload.device import configure, peak_memory_mib, reset_peak_memory
from jobkit.payload.distributed import Group, join
from jobkit.payload.main import leave
from jobkit.payload.place import read_rank_env
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.planner.memory import Subject, footprint
from jobkit.spec.runspec import RunSpec

MAX_ISSUE_SHARE = 0.7  # chosen; above it the host limits the rate, not the GPU
PREDICTED = (0.8, 1.25)  # chosen; on the CPU the prediction is within 10 %
OTHER_TORCH = (
    "install a torch for this driver and GPU: make LOCK= venv with the PIP_INDEX_URL that "
    "pytorch.org/get-started says for CUDA 12.6 or 12.8, or use the site's container"
)


@dataclass(frozen=True)
class Number:
    """A measured number with its bounds. A value of None was not measured."""

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    why: str = ""

    @property
    def missed(self) -> bool:
        """Return whether the number was measured and is outside of its bounds."""
        if self.value is None:
            return False
        low = self.least is not None and not self.value >= self.least  # NaN is outside
        return low or (self.most is not None and not self.value <= self.most)

    def line(self) -> str:
        """Return the line for people."""
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        ends = {"at least": self.least, "at most": self.most}
        bounds = [f"{word} {end:g}" for word, end in ends.items() if end is not None]
        text = f"{'MISSED' if self.missed else 'ok':<7}{self.name}: {value}"
        return text + f" ({', '.join(bounds)})" * bool(bounds) + f"; {self.why}" * bool(self.why)


def environment(device: str) -> list[Number]:
    """Return the numbers of the environment. Raises UsageError where torch cannot use the GPU."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, for {torch.cuda.get_arch_list()}")
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return [Number("cores", cores)]
    try:
        count = torch.cuda.device_count()
        gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
        raise UsageError(
            f"the GPU cannot be used: {one_line(str(error))[:200]}; {OTHER_TORCH}"
        ) from None
    for name in dict.fromkeys(f"{gpu.name}, sm_{gpu.major}{gpu.minor}" for gpu in gpus):
        print(f"GPU: {name}")
    for gpu in gpus:
        capability, built = f"sm_{gpu.major}{gpu.minor}", torch.cuda.get_arch_list()
        if not torch.version.hip and not any(runs_on(name, capability) for name in built):
            raise UsageError(f"torch has no code for {gpu.name}: {OTHER_TORCH}")
    why = "request them with --cpus-per-task; the host must issue work faster than a GPU does it"
    return [
        Number("GPUs", count),
        Number("cores per GPU", cores / count, "", MIN_CORES_PER_GPU, None, why),
    ]


class NoWaits:
    """An observer of training: from before the first step of an epoch until after its last one,
    torch raises an error where the host waits for the GPU."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.seen = device, steps, 0
        self.begun = self.issue_s = 0.0

    def wants(self, trainer: Trainer) -> bool:
        """Return True: every step is observed."""
        return True

    def before(self, trainer: Trainer, step: Step) -> None:
        """Forbid waits from the first step on."""
        if self.seen == 0:
            self.begun = time.perf_counter()
            sync_debug(self.device, "error")

    def after(self, trainer: Trainer, step: Step) -> None:
        """Allow waits again after the last step: the end of an epoch reads its sums."""
        self.seen += 1
        if self.seen == self.steps:
            sync_debug(self.device, "default")
            self.issue_s = time.perf_counter() - self.begun


def sync_debug(device: torch.device, mode: str) -> None:
    """Set what torch does where the host waits for the GPU. On a CPU there is nothing to set."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def epoch(spec: RunSpec, group: Group) -> list[Number]:
    """Train two epochs, the second one without waits, and return its numbers."""
    device = group.device
    data = synthetic(spec.train_samples or 0, spec.test_samples or 0)
    configure(spec, device)
    report = Reporter(None, 0, 1)  # prints nothing
    trainer = build_trainer(spec, group, data, report)
    trainer.train_epoch(0, lambda _: None)
    reset_peak_memory(device)
    observer = NoWaits(device, len(trainer.batches))
    trainer.observers = [observer]
    name, on_gpu = f"{spec.model} {spec.strategy}", device.type == "cuda"
    waits, numbers = "", []
    try:
        clock, _, _ = trainer.train_epoch(1, lambda _: None)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        waits = f"rank {group.place.rank}: {one_line(str(error))[:120]} at {place_of(error)}"
    finally:
        sync_debug(device, "default")
        report.close()
    # All ranks say so; else those that go on would wait for one that has stopped.
    waits = next(filter(None, group.gather(waits)), "")
    numbers.append(
        Number(f"{name}: steps that wait for the GPU", float(bool(waits)), "", None, 0, waits)
    )
    if waits:
        return numbers
    elapsed_s, rate = clock.elapsed_s(), clock.images / clock.elapsed_s()
    share = observer.issue_s / elapsed_s if on_gpu else None
    peak = peak_memory_mib(device).allocated if on_gpu else None
    predicted = footprint(
        spec,
        Subject(
            classes=len(data.classes),
            images=len(data.train.labels) + len(data.test.labels),
        ),
    )
    ratio = peak and predicted.total / 2**20 / peak
    return [
        *numbers,
        Number(f"{name}: rate of this rank", rate, "images/s"),
        Number(
            f"{name}: share of the time in which the host issues work",
            share,
            "",
            None,
            MAX_ISSUE_SHARE,
        ),
        Number(
            f"{name}: memory predicted / measured",
            ratio,
            "",
            *PREDICTED,
            f"{peak:.0f} MiB measured" if peak else "",
        ),
    ]


def place_of(error: BaseException) -> str:
    """Return the innermost place of an error in this project."""
    place, frame = "?", error.__traceback__
    while frame:
        name = frame.tb_frame.f_code.co_filename
        if "jobkit" in name:
            place = f"{Path(name).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def settings(device: str, strategy: str, ranks: int) -> RunSpec:
    """Return the training of an epoch: ResNet-18 in bf16, or a small one in a rehearsal."""
    small = device == "cpu"
    common: dict[str, Any] = {"dataset": "synthetic", "device": device, "strategy": strategy}
    sizes = (256, 64) if small else (10240, 1024)
    return RunSpec(
        **common, model="mlp" if small else "resnet18", precision="fp32" if small else "bf16",
        train_samples=sizes[0], test_samples=10, global_batch_size=sizes[1],
        warmup_iterations=0, ranks_per_node=ranks,
    )  # fmt: skip


def parser() -> Parser:
    """Return the parser of the command line."""
    new = Parser(prog="python -m jobkit.checks.gpu", description=__doc__.splitlines()[0])
    new.add_argument("part", choices=("environment", "epoch"))
    new.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    new.add_argument("--strategy", default="ddp", help="of the epoch (default: ddp)")
    return new


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the numbers of a part; return 4 where one is outside of its bounds."""
    args = parser().parse_args(argv)
    if args.part == "environment":
        return show(environment(args.device))
    place = read_rank_env()
    group = join(args.device, place, 120.0)
    numbers = epoch(settings(args.device, args.strategy, place.world_size), group)
    group.close()
    return show(numbers) if place.rank == 0 else Exit.OK


def show(numbers: Sequence[Number]) -> int:
    """Print the numbers and return the exit code."""
    print("\n".join(number.line() for number in numbers), flush=True)
    return Exit.THRESHOLD if any(number.missed for number in numbers) else Exit.OK


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
