"""`make bench`: every strategy at one and at two ranks against single, at batch 256 a rank.

At one rank the strategies stand ready in processes of their own and take turns, so what differs is
what the strategy itself costs. At two ranks each is a run of run.sh, one thread a rank, against
single with one thread: 2 is ideal for those that share the batch out. Figures are medians, ratios
medians of the ratios within a round.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from throughput import ROOT, Worker, ratio, run_rate

ALONE = ("single", "dp", "ddp", "fsdp", "mp", "pp")
MOST = {"ddp": 1.05, "fsdp": 1.10}  # time of an iteration against single
TOGETHER = {
    "ddp": ("ddp",),
    "ddp, zero1": ("ddp", "--zero1"),
    "fsdp": ("fsdp",),
    "fsdp, kept gathered": ("fsdp", "--no-fsdp-reshard-after-forward"),
    "pp": ("pp", "--microbatches", "4"),
    "mp": ("mp",),
}
Rates = dict[str, list[float]]


def alone(rounds: int, threads: int) -> Rates:
    """Images a second of each strategy at one rank, round by round."""
    workers = {name: Worker(f"payload-{name}", "fp32", threads) for name in ALONE}
    found: Rates = {name: [] for name in ALONE}
    for turn in range(rounds):
        # Each round begins with another one: who comes after whom must not count.
        for name in (*ALONE[turn % len(ALONE) :], *ALONE[: turn % len(ALONE)]):
            found[name].append(workers[name].measure("")[0])
    for worker in workers.values():
        worker.end()
    return found


def together(rounds: int) -> Rates:
    """Images a second at two ranks, and of single, round by round."""
    found: Rates = {"single": []}
    with tempfile.TemporaryDirectory() as data:
        for _ in range(rounds):
            found["single"].append(run_rate("single", 1, data))
            for name, (strategy, *more) in TOGETHER.items():
                found.setdefault(name, []).append(run_rate(strategy, 2, data, *more))
    return found


def show(title: str, rates: Rates, most: dict[str, float]) -> None:
    """Print a table: images a second, and the ratio to single."""
    print(f"\n{title}\n{'strategy':20} {'images/s':>9} {'of single':>10} {'overhead':>9}")
    for name, values in rates.items():
        share = ratio(values, rates["single"])
        line = f"{name:20} {median(values):9.0f} {share:10.3f} {1 / share - 1:9.1%}"
        if name in most:
            verdict = "reached" if 1 / share <= most[name] else "missed"
            line += f"  at most {most[name] - 1:.0%}: {verdict}"
        print(line)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds at one rank (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="rounds at two ranks (default 3)")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-strategies.json")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"measuring strategies at one rank, {threads} threads ...", file=sys.stderr)
    one = alone(args.rounds, threads)
    show(f"one rank, {threads} threads, batch 256", one, MOST)
    print("measuring strategies at two ranks of one thread ...", file=sys.stderr)
    two = together(args.runs)
    show("two ranks of one thread, batch 256 in all; single: one rank of one thread", two, {})
    args.output.write_text(json.dumps({"one_rank": one, "two_ranks": two}, indent=1) + "\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
