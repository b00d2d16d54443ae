"""Training speed: our loop against the tutorials', strategies, settings, ranks.

    python tests/bench/throughput.py                       all cases
    python tests/bench/throughput.py loops ranks --rounds 3

loops: images per second of the recipe of many tutorials (plain-0 and plain-2: PIL images,
torchvision transforms, a DataLoader with 0 or 2 workers), of ours, and of ours on one batch that
lies ready (nodata). settings: torch.compile against the default. ranks: runs of run.sh at two ranks
against one, one thread each, also with --check-ranks 50.

What is compared takes turns, so that a drift of the machine meets all alike: processes stand ready
and train when they are told to. Figures are medians, ratios medians of those within a round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from bench import ENV, MORE, NEITHER, ROOT, Figures, report

BATCH, BATCHES, LR = 256, 14, 0.01
LOOPS = {"plain-0": "plain-0", "plain-2": "plain-2", "ours": "payload", "nodata": "payload"}
RANKS = {  # run.sh's words at a number of ranks
    "single-1": (1, "single"),
    "ddp-1": (1, "ddp"),
    "ddp-2": (2, "ddp"),
    "ddp-2 checked": (2, "ddp", "--check-ranks", "50"),
    "fsdp-1": (1, "fsdp"),
    "fsdp-2": (2, "fsdp"),
    "pp-2": (2, "pp", "--microbatches", "4"),
    "mp-2": (2, "mp"),
}
LIMITS = {
    "fp32 ours / plain": 1.4,
    "fp32 ours / nodata": 0.97,
    "ddp, 2 ranks / 1": 1.85,
    "fsdp, 2 ranks / 1": 1.6,
}
Rates = dict[str, list[float]]  # images per second, round by round


def precisions() -> tuple[str, ...]:
    """bf16 where the processor computes in it: elsewhere it is slow, and says nothing."""
    flags = Path("/proc/cpuinfo").read_text()
    return ("fp32", "bf16") if "avx512_bf16" in flags or "amx_bf16" in flags else ("fp32",)


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each round."""
    return median(a / b for a, b in zip(above, below, strict=True))


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name once a round; each round begins with another one."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


class Worker:
    """A process that stands ready to train; it takes no time while others run."""

    def __init__(self, loop: str, precision: str) -> None:
        threads = str(len(os.sched_getaffinity(0)))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", loop, precision, threads],
            stdin=-1, stdout=-1, text=True, env=ENV,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n", loop

    def measure(self, how: str = "") -> float:
        """Images per second of one training."""
        self.process.stdin.write(f"{how}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def stand_ready(loops: dict[str, str], precision: str, rounds: int) -> Rates:
    """Images per second of each loop."""
    workers = {loop: Worker(loop, precision) for loop in dict.fromkeys(loops.values())}
    found: Rates = {name: [] for name in loops}
    for name in turns([*loops], rounds):
        found[name].append(workers[loops[name]].measure("nodata" if name == "nodata" else ""))
    for worker in workers.values():
        worker.end()
    return found


def show(title: str, rates: Rates) -> None:
    for name, values in rates.items():
        low, mid, high = min(values), median(values), max(values)
        print(f"{title:10} {name:22} {mid:8.0f} images/s  ({low:.0f} to {high:.0f})", flush=True)


def loops(rounds: int) -> Figures:
    figures: Figures = {}
    for precision in precisions():
        rates = stand_ready(LOOPS, precision, rounds)
        show(precision, rates)
        best = max(("plain-0", "plain-2"), key=lambda way: median(rates[way]))
        figures[f"{precision} ours / plain"] = ratio(rates["ours"], rates[best]), MORE
        figures[f"{precision} ours / nodata"] = ratio(rates["ours"], rates["nodata"]), MORE
    return figures


def settings(rounds: int) -> Figures:
    figures: Figures = {}
    for precision in precisions():
        rates = stand_ready({"default": "payload", "compile": "payload+compile"}, precision, rounds)
        show(precision, rates)
        share = ratio(rates["compile"], rates["default"])
        figures[f"{precision} compile / default"] = share, NEITHER
    return figures


def run_rate(ranks: int, strategy: str, data: str, *more: str) -> float:
    """Images per second of a run of run.sh with one thread per rank: the median of its epochs."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"""--nproc-per-node {ranks} --run-dir {folder}/bench/run --strategy {strategy}
            --dataset synthetic --train-samples 4096 --test-samples 100 --epochs 4 --threads 1
            --global-batch-size {BATCH} --lr {LR} --data-dir {data} --why 0"""
        subprocess.run(
            ["bash", "run.sh", *words.split(), *more], cwd=ROOT, check=True, env=ENV, stdout=-3
        )
        lines = Path(folder, "bench/run/metrics/0.jsonl").read_text().splitlines()
    epochs = [r for r in map(json.loads, lines) if r["kind"] == "epoch"]
    return median(r["images_per_s"] for r in epochs[1:])


def plain_ddp() -> float:
    """Images per second of the plain recipe under DDP, two ranks of one thread."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(
        [sys.executable, *words, "--worker", "plain-0", "fp32", "1"],
        check=True, capture_output=True, text=True, env={**ENV, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(done.stdout)


def ranks(rounds: int) -> Figures:
    rates: Rates = {name: [] for name in (*RANKS, "plain-ddp-2")}
    with tempfile.TemporaryDirectory() as data:
        for name in turns([*rates], rounds):
            if name == "plain-ddp-2":
                rates[name].append(plain_ddp())
                continue
            size, strategy, *more = RANKS[name]
            rates[name].append(run_rate(size, strategy, data, *more))
    show("ranks", rates)
    pairs = {f"{s}, 2 ranks / 1": (f"{s}-2", f"{s}-1") for s in ("ddp", "fsdp")}
    pairs |= {f"{name} / single-1": (name, "single-1") for name in ("pp-2", "mp-2")}
    pairs["ddp, 2 ranks: ours / plain"] = "ddp-2", "plain-ddp-2"
    pairs["ddp-2: --check-ranks 50 / without"] = "ddp-2 checked", "ddp-2"
    return {name: (ratio(rates[a], rates[b]), MORE) for name, (a, b) in pairs.items()}


# In the processes that stand ready


def plain(precision: str, workers: int) -> Callable[[str], float]:
    """The tutorial's loop, on the same CNN."""
    import peers

    epoch = peers.plain(peers.pil_images(BATCHES), precision == "bf16", workers)

    def measure(_: str) -> float:
        start = time.perf_counter()
        epoch()
        return BATCH * BATCHES / (time.perf_counter() - start)

    return measure


def payload(precision: str, threads: int, compiled: bool) -> Callable[[str], float]:
    """The payload's own loop, with its batches or, told "nodata", with one that lies ready."""
    import torch

    from jobkit.payload.place import read_rank_env
    from jobkit.payload.report import Reporter
    from jobkit.payload.run import RankJob, set_up
    from jobkit.spec.runspec import RunSpec

    spec = RunSpec(
        strategy="single", dataset="synthetic", train_samples=BATCH * BATCHES, test_samples=10,
        global_batch_size=BATCH, precision=precision, threads=threads, lr=LR, warmup_iterations=0,
        compile=compiled,
    )  # fmt: skip
    job = RankJob(spec=spec, place=read_rank_env(), paths=None, dry_run=True)
    trainer = set_up(job, Reporter(None, 0, 1))
    ready = trainer.data.training_batch(torch.arange(BATCH), 0)
    loads = {"": trainer.data.training_batch, "nodata": lambda *_: ready}

    def measure(how: str) -> float:
        trainer.data.training_batch = loads[how]
        trainer.train_epoch(1)
        return trainer.clock.images / trainer.clock.elapsed_s()

    return measure


def work(loop: str, precision: str, threads: int) -> None:
    """Get ready, say so, then measure once for each line of standard input."""
    import torch

    torch.set_num_threads(threads)
    if loop.startswith("plain"):
        measure = plain(precision, int(loop.split("-")[1]))
    else:
        measure = payload(precision, threads, compiled="compile" in loop)
    measure("")  # warm up
    if "RANK" in os.environ:  # under torchrun: no other rank, so several measures at once
        rates = [measure("") for _ in range(3)]
        if os.environ["RANK"] == "0":
            print(median(rates), flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        print(measure(line.strip()), flush=True)


CASES: dict[str, Callable[[int], Figures]] = {
    case.__name__: case for case in (loops, settings, ranks)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    args = parser.parse_args()
    figures: Figures = {}
    for case in args.cases or CASES:
        figures |= CASES[case](args.rounds)
    return report(figures, LIMITS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main())
