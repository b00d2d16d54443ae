"""`make bench`: ours beside the plain loop, Lightning, Accelerate and transformers' Trainer.

    python tests/bench/peers.py --rounds 1      rough

The same CNN, optimizer, batch size and number of random images, fp32 and, where the processor has
it, bf16; one rank with all cores as threads, and two ranks that share them. Every run is a process
of its own (ours: the training that run.sh starts), and the ways take turns, each round in another
order. Printed are medians over the rounds, and medians of ours over each peer within a round, for
images a second, the start of the process to the first step, and CPU time of the whole run, start
included: the last says something on a machine that is not idle, too. Writes bench_peers.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from throughput import ROOT, has_bf16, machine

PEERS = ("plain", "lightning", "accelerate", "transformers")
BATCH, WARM = 256, 2
TARGETS = {"fp32": 1.9, "bf16": 2.2}
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
Figures = dict[str, float]


def environment(threads: int) -> dict[str, str]:
    """What every way is started with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JOBKIT_", "SLURM_"))}
    paths = f"{ROOT / 'src'}:{ROOT / 'tests/bench'}"
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}


def ours(ranks: int, precision: str, threads: int, steps: int, folder: str) -> list[str]:
    """The words that train with the payload, as run.sh starts it."""
    return [
        *("-m", "jobkit.payload.main", "--run-dir", f"{folder}/run", "--data-dir", folder),
        *("--strategy", "ddp" if ranks > 1 else "single", "--dataset", "synthetic"),
        *("--train-samples", str(BATCH * steps), "--test-samples", "10", "--epochs", "1"),
        *("--global-batch-size", str(BATCH), "--precision", precision, "--lr", "0.01"),
        *("--threads", str(threads), "--warmup-iterations", str(WARM)),
        *("--breakdown-iterations", "0", "--device", "cpu"),
    ]


def figures_of(folder: str) -> Figures:
    """The same figures as a peer prints, from our run's records."""
    lines = Path(folder, "run/metrics/0.jsonl").read_text().splitlines()
    records = {record["kind"]: record for record in map(json.loads, lines)}
    startup = records["startup"]  # the second, of after the first step
    first = startup["total_s"] + startup["first_step_s"]
    return {"first_step_s": first, "images_per_s": records["epoch"]["images_per_s"]}


def run(way: str, ranks: int, precision: str, steps: int) -> Figures:
    """One training of one way: its figures, and the CPU seconds of all its processes."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        if way == "ours":
            words = ours(ranks, precision, threads, steps, folder)
        else:
            words = [str(ROOT / "tests/bench/peer.py"), way, precision, str(threads), str(steps)]
        launch = LAUNCH if ranks > 1 else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *launch, *words],
            env=environment(threads), cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"peers.py: {way}, {ranks} ranks: {done.stderr[-2000:]}")
        if way == "ours":
            found = figures_of(folder)
        else:
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_step_s')]
            found = json.loads(lines[-1])
    found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def measured(ways: list[str], ranks: int, precision: str, rounds: int, steps: int) -> dict:
    """The figures of each way, round by round."""
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for turn in range(rounds):
        start = turn % len(ways)
        for way in ways[start:] + ways[:start]:
            found[way].append(run(way, ranks, precision, steps))
    return found


def ratio(found: dict[str, list[Figures]], way: str, what: str) -> float:
    """Ours over another way: the median of the ratios within a round."""
    pairs = zip(found["ours"], found[way], strict=True)
    return median(own[what] / other[what] for own, other in pairs)


def mid(figures: list[Figures], what: str) -> float:
    """The median over the rounds."""
    return median(each[what] for each in figures)


def show(name: str, precision: str, found: dict[str, list[Figures]]) -> Figures:
    """Print the table of one setting; return its ratios of ours over the best peer."""
    print(f"{name:14}    images/s   first step      CPU   ours / it: rate   start     CPU")
    for way, figures in found.items():
        line = f"  {way:12} {mid(figures, 'images_per_s'):8.0f}"
        line += f" {mid(figures, 'first_step_s'):10.2f} s {mid(figures, 'cpu_s'):6.1f} s"
        if way != "ours":
            parts = [ratio(found, way, w) for w in ("images_per_s", "first_step_s", "cpu_s")]
            line += "{:19.2f} {:7.2f} {:7.2f}".format(*parts)
        print(line)
    peers = [way for way in found if way != "ours"]
    best = max(peers, key=lambda way: mid(found[way], "images_per_s"))
    quickest = min(peers, key=lambda way: mid(found[way], "first_step_s"))
    rate, start = ratio(found, best, "images_per_s"), ratio(found, quickest, "first_step_s")
    target = TARGETS[precision]
    said = ["missed", "reached"]
    print(f"  rate: {rate:.2f} times {best}; to reach {target:g}: {said[rate >= target]}")
    print(f"  start: {start:.2f} times {quickest}; at most 1: {said[start <= 1]}", flush=True)
    return {f"{name} ours / best peer": rate, f"{name} first step, best peer / ours": 1 / start}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps (default 14)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "bench_peers.json")
    args = parser.parse_args()
    if args.steps <= WARM or args.rounds < 1:
        parser.error(f"--steps must be above {WARM}, --rounds above 0")
    absent = [way for way in PEERS if way != "plain" and not find_spec(way)]
    if absent:
        print(f"not installed, left out (pip install '.[adapters]'): {', '.join(absent)}")
    ways = ["ours", *(way for way in PEERS if way not in absent)]
    ratios, settings = {}, {}
    for precision in ("fp32", "bf16") if has_bf16() else ("fp32",):
        for ranks in args.ranks:
            name = f"{precision}, {ranks} rank" + "s" * (ranks > 1)
            found = settings[name] = measured(ways, ranks, precision, args.rounds, args.steps)
            ratios |= show(name, precision, found)
    result = {**machine(), "rounds": args.rounds, "settings": settings, "ratios": ratios}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
