"""The recipe against the CNN on real images: seconds of training to a test accuracy.

    python tests/bench/recipe.py folder:cifar10-jpeg.tar

Both train with the same threads and precision, one after the other, in alternating order; each has
a schedule of as many epochs as it needs for the accuracy, which is checked. A time is the median
over the rounds of: training alone, and the whole process from its start to its end (start-up,
training, evaluation after each epoch). The ratio is the median of the ratios within each round.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from throughput import ENV, ROOT, ratio

WAYS = {
    "cnn": ("--model", "cnn", "--global-batch-size", "256"),
    "recipe": ("--recipe", "fast-cpu"),
}
# Accuracy: the epochs of a schedule with which each reaches it.
EPOCHS = {0.70: {"cnn": 5, "recipe": 1}, 0.75: {"cnn": 7, "recipe": 2}}


@dataclass(frozen=True)
class Run:
    """What one training took and reached."""

    accuracy: float
    training_s: float
    evaluation_s: float
    total_s: float
    cpu_s: float  # of all its processes: what other load does not change


def children_cpu_s() -> float:
    """CPU seconds of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(way: str, epochs: int, args: argparse.Namespace, seed: int) -> Run:
    """Train once, by run.sh, on the images; what it took."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--nproc-per-node", "1", "--run-dir", f"{folder}/bench/run", *WAYS[way]]
        words += ["--strategy", "single", "--dataset", args.dataset, "--epochs", str(epochs)]
        words += ["--device", "cpu", "--precision", args.precision, "--seed", str(seed)]
        words += ["--threads", str(args.threads), "--breakdown-iterations", "0"]
        words += ["--warmup-iterations", "0"]  # every iteration is timed
        words += ["--data-dir", args.data_dir] if args.data_dir else []
        before = children_cpu_s()
        subprocess.run(["bash", "run.sh", *words], cwd=ROOT, check=True, env=ENV, stdout=-3)
        lines = Path(folder, "bench/run/metrics/0.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    epochs_done = [r for r in records if r["kind"] == "epoch"]
    (end,) = (r for r in records if r["kind"] == "run_end")
    return Run(
        accuracy=end["val_accuracy"],
        training_s=sum(r["epoch_time_s"] for r in epochs_done),
        evaluation_s=sum(r["eval_time_s"] for r in epochs_done),
        total_s=end["total_time_s"],
        cpu_s=children_cpu_s() - before,
    )


def measure(args: argparse.Namespace) -> dict[tuple[float, str], list[Run]]:
    """Every way to every accuracy, round by round; each round begins with the other one."""
    found: dict[tuple[float, str], list[Run]] = {}
    for turn in range(args.rounds):
        for target in args.accuracy:
            for way in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
                run = train(way, EPOCHS[target][way], args, seed=turn)
                found.setdefault((target, way), []).append(run)
                print(f"round {turn + 1}, {target:.0%}, {way}: {run}", file=sys.stderr)
    return found


def show(found: dict[tuple[float, str], list[Run]]) -> None:
    """Print the table."""
    print(f"{'to reach':9} {'':7} epochs  accuracy  training (s)  in all (s)  CPU (s)")
    for (target, way), runs in found.items():
        worst = min(run.accuracy for run in runs)
        print(
            f"{target:<9.0%} {way:7} {EPOCHS[target][way]:6} {worst:9.1%} "
            f"{median(r.training_s for r in runs):13.1f} {median(r.total_s for r in runs):11.1f} "
            f"{median(r.cpu_s for r in runs):8.1f}" + ("" if worst >= target else "  missed")
        )
    for target in dict.fromkeys(target for target, _ in found):
        cnn, recipe = (found[target, way] for way in ("cnn", "recipe"))
        alone = ratio([r.training_s for r in cnn], [r.training_s for r in recipe])
        whole = ratio([r.total_s for r in cnn], [r.total_s for r in recipe])
        cpu = ratio([r.cpu_s for r in cnn], [r.cpu_s for r in recipe])
        print(
            f"{target:.0%}: cnn / recipe  {alone:.2f} of training, {whole:.2f} in all, "
            f"{cpu:.2f} of CPU"
        )


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", help="as --dataset of run.sh: folder:cifar10-jpeg.tar")
    parser.add_argument("--rounds", type=int, default=2, help="rounds (default 2)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--data-dir", help="as of run.sh")
    parser.add_argument(
        "--accuracy", type=float, nargs="+", choices=sorted(EPOCHS), default=sorted(EPOCHS)
    )
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, {args.precision}")
    show(measure(args))


if __name__ == "__main__":
    main()
