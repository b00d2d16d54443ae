"""Training speed of ours: waiting for data, torch.compile, and ranks.

    python tests/bench/throughput.py                       all cases
    python tests/bench/throughput.py ranks --rounds 3

loop: images per second of our loop, of the same on one batch that lies ready (nodata), and with
torch.compile. ranks: runs of run.sh at two ranks against one, one thread each, and two runs of one
rank at once, which know nothing of each other: what two cores of this machine have for them. Other
trainers are in peers.py.

What is compared takes turns, so that a drift of the machine meets all alike. Figures are medians,
ratios medians of those within a round.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench import ENV, ROOT, Figures, report

BATCH, BATCHES, LR = 256, 14, 0.01
STRATEGIES = ("ddp", "fsdp")
LIMITS = {"fp32 ours / nodata": 0.97, "ddp, 2 ranks / 1": 1.85, "fsdp, 2 ranks / 1": 1.6}
Rates = dict[str, list[float]]  # images per second, round by round


def precisions() -> tuple[str, ...]:
    """bf16 where the processor computes in it: elsewhere it is slow, and says nothing."""
    flags = Path("/proc/cpuinfo").read_text()
    return ("fp32", "bf16") if "avx512_bf16" in flags or "amx_bf16" in flags else ("fp32",)


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name once a round; each round begins with another one."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def take_turns(ways: dict[str, Callable[[], float]], rounds: int, title: str) -> Rates:
    """Images per second of each way, printed."""
    rates: Rates = {name: [] for name in ways}
    for name in turns([*ways], rounds):
        rates[name].append(ways[name]())
    for name, values in rates.items():
        low, mid, high = min(values), median(values), max(values)
        print(f"{title:10} {name:22} {mid:8.0f} images/s  ({low:.0f} to {high:.0f})", flush=True)
    return rates


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each round."""
    return median(a / b for a, b in zip(above, below, strict=True))


def loop(rounds: int) -> Figures:
    import torch

    from jobkit.payload.data import load_data
    from jobkit.payload.device import keep_freed_memory
    from jobkit.payload.distributed import join
    from jobkit.payload.place import read_rank_env
    from jobkit.payload.report import Reporter
    from jobkit.payload.run import build_trainer
    from jobkit.spec.runspec import RunSpec

    spec = RunSpec(
        strategy="single", dataset="synthetic", train_samples=BATCH * BATCHES, test_samples=10,
        global_batch_size=BATCH, threads=len(os.sched_getaffinity(0)), lr=LR, warmup_iterations=0,
    )  # fmt: skip
    torch.set_num_threads(spec.threads)
    keep_freed_memory()  # as every run does
    group = join("cpu", read_rank_env(), spec.timeout_s, print)
    data = load_data(spec, group, print, dry_run=True)

    def way(nodata: bool = False, **settings: Any) -> Callable[[], float]:
        trainer = build_trainer(replace(spec, **settings), group, data, Reporter(None, 0, 1))
        load = trainer.data.training_batch
        ready = load(torch.arange(BATCH), 0)

        def epoch() -> float:
            """Images per second; nodata: on one batch, which is ready."""
            trainer.data.training_batch = (lambda *_: ready) if nodata else load
            trainer.train_epoch(1)
            return trainer.windows.images / trainer.windows.epoch_s

        epoch()  # warm up
        return epoch

    figures: Figures = {}
    for precision in precisions():
        ways = {"ours": way(precision=precision), "nodata": way(True, precision=precision)}
        ways["compile"] = way(precision=precision, compile=True)
        rates = take_turns(ways, rounds, precision)
        figures[f"{precision} ours / nodata"] = ratio(rates["ours"], rates["nodata"])
        figures[f"{precision} compile / ours"] = ratio(rates["compile"], rates["ours"])
    return figures


def run_rate(data: str, ranks: int, strategy: str) -> float:
    """Images per second of a run of run.sh with one thread per rank: the median of its epochs."""
    from support.records import records_of

    with tempfile.TemporaryDirectory() as folder:
        words = f"""--nproc-per-node {ranks} --run-dir {folder}/bench/run --strategy {strategy}
            --dataset synthetic --train-samples 4096 --test-samples 100 --epochs 4 --threads 1
            --global-batch-size {BATCH} --lr {LR} --data-dir {data} --why 0"""
        subprocess.run(["bash", "run.sh", *words.split()], cwd=ROOT, check=True, env=ENV, stdout=-3)
        epochs = records_of(Path(folder, "bench/run/metrics/0.jsonl"), "epoch")
    return median(r["images_per_s"] for r in epochs[1:])


def ranks(rounds: int) -> Figures:
    with tempfile.TemporaryDirectory() as data:
        ways = {f"{s}-{n}": partial(run_rate, data, n, s) for s in STRATEGIES for n in (1, 2)}
        with ThreadPoolExecutor(2) as pool:
            ways["two at once"] = lambda: sum(pool.map(run_rate, [data] * 2, [1] * 2, ["ddp"] * 2))
            rates = take_turns(ways, rounds, "ranks")
    figures = {f"{s}, 2 ranks / 1": ratio(rates[f"{s}-2"], rates[f"{s}-1"]) for s in STRATEGIES}
    return figures | {"two at once / 1": ratio(rates["two at once"], rates["ddp-1"])}


CASES: dict[str, Callable[[int], Figures]] = {"loop": loop, "ranks": ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    args = parser.parse_args()
    figures: Figures = {}
    for case in args.cases or CASES:
        figures |= CASES[case](args.rounds)
    return report(figures, at_least=LIMITS)


if __name__ == "__main__":
    sys.exit(main())
