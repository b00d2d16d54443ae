"""`make bench`: torch.compile and the memory format against the defaults, on one rank.

    python tests/bench/formats.py --rounds 3

Our own loop with its defaults (channels last, not compiled), with contiguous tensors, and compiled.
Each stands ready in a process of its own, and they take turns; figures are medians, ratios medians
of those within a round. ready: seconds until a process has trained once on 3,584 images,
compilation included. In fp32 and, where the processor has it, bf16, with all cores as threads.
"""

import argparse
import os
import time
from statistics import median

from throughput import Worker, has_bf16, machine, ratio

WAYS = ("", "+contiguous", "+compile")


def measure(model: str, precision: str, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Images per second by way, round by round; seconds until each way was ready."""
    threads, workers, ready = len(os.sched_getaffinity(0)), {}, []
    chosen = "" if model == "cnn" else f"+{model}"
    for way in WAYS:
        start = time.monotonic()
        workers[way] = Worker(f"payload-single{chosen}{way}", precision, threads)
        ready.append(time.monotonic() - start)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        first = turn % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            found[way].append(workers[way].measure("")[0])
    for worker in workers.values():
        worker.end()
    return found, ready


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--models", nargs="+", choices=("cnn", "resnet18"), default=["cnn"])
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'':36} images/s  of default  ready")
    for model in args.models:
        for precision in ("fp32", "bf16") if has_bf16() else ("fp32",):
            found, ready = measure(model, precision, args.rounds)
            for way, seconds in zip(WAYS, ready, strict=True):
                name = f"{model} {precision} {way.lstrip('+') or 'default'}"
                rate, share = median(found[way]), ratio(found[way], found[""])
                print(f"{name:36} {rate:8.0f} {share:11.3f} {seconds:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
