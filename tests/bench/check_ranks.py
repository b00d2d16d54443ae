"""What --check-ranks costs: the time of a check beside that of 50 iterations.

    PYTHONPATH=src torchrun --nproc-per-node 2 tests/bench/check_ranks.py --device cpu

Prints medians over iterations, maximum over ranks.
"""

import argparse
import statistics
import time

import torch

from jobkit.payload.data.cache import Dataset
from jobkit.payload.data.sources import synthetic
from jobkit.payload.distributed import join
from jobkit.payload.guard.same_ranks import SameRanks
from jobkit.payload.place import read_rank_env
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.spec.runspec import RunSpec

EVERY = 50


def seconds(device: torch.device, act) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given.add_argument("--model", default="cnn")
    given.add_argument("--batch-size-per-rank", type=int, default=64)
    given.add_argument("--iterations", type=int, default=30)
    args = given.parse_args()
    place = read_rank_env()
    torch.set_num_threads(1)
    group = join(args.device, place, 600.0)
    spec = RunSpec(
        model=args.model, dataset="synthetic", train_samples=4096, test_samples=64,
        batch_size_per_rank=args.batch_size_per_rank, ranks_per_node=place.local_world_size,
        nodes=place.nodes, device=args.device, precision="fp32", strategy="ddp",
    )  # fmt: skip
    train, test, classes = synthetic(4096, 64)
    trainer = build_trainer(spec, group, Dataset(train, test, classes), Reporter(None, 0, 1))
    check = SameRanks(trainer, EVERY)
    steps, checks = [], []
    while len(steps) < args.iterations:
        for step in trainer.batches.epoch(0, 0, trainer.data.device):
            begin = lambda s=step: trainer._train_step(s, 0, trainer.clock)  # noqa: E731
            steps.append(seconds(group.device, begin))
            checks.append(seconds(group.device, lambda s=step: check.after(trainer, s)))
    half = len(steps) // 4  # the first ones warm up
    own = {"step": statistics.median(steps[half:]), "check": statistics.median(checks[half:])}
    worst = group.reduce(own, "max")
    if place.rank == 0:
        cost = worst["check"] / (EVERY * worst["step"])
        print(
            f"{place.world_size} ranks, {args.model}, {trainer.strategy.parameter_count:,} "
            f"parameters: iteration {1000 * worst['step']:.3g} ms, check "
            f"{1000 * worst['check']:.3g} ms: {cost:.2%} with --check-ranks {EVERY}"
        )
    group.close()


main()
