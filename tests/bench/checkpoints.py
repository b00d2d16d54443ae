"""`make bench`: what checkpoints cost a run, and two ranks their agreement at each iteration.

One process trains the default CNN on 10,000 generated images, with and without a checkpoint an
epoch, in turns; the cost of the checkpoints is also read off the run itself, which counts the
seconds that each took. Two ranks then train a small model in batches of 16, epochs with the
guard's agreement and without in turns. Figures are medians, ratios medians of those within a round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from throughput import ENV, ROOT, ratio

EPOCHS = 4
MOST = 1.02  # of the run's time without checkpoints


def run(data: str, *words: str) -> tuple[float, float]:
    """Seconds of a run from its first iteration to its end, and of them writing checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        how = ["--run-dir", f"{folder}/run", "--data-dir", data, "--strategy", "single"]
        how += ["--dataset", "synthetic", "--train-samples", "10000", "--test-samples", "1000"]
        how += ["--epochs", str(EPOCHS), "--global-batch-size", "256", "--lr", "0.01", *words]
        command = [sys.executable, "-m", "jobkit.payload.main", *how]
        subprocess.run(command, check=True, env=ENV, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run/metrics/0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    begin = next(r["t"] for r in records if r["kind"] == "startup")
    saved = [r["time_s"] for r in records if r["kind"] == "checkpoint"]
    assert len(saved) in (0, EPOCHS)
    return records[-1]["t"] - begin, sum(saved)


def cost(rounds: int) -> dict[str, list[float]]:
    """Seconds of runs with and without a checkpoint an epoch, round by round."""
    found: dict[str, list[float]] = {"without": [], "each epoch": [], "of it, writing": []}
    with tempfile.TemporaryDirectory() as data:
        for turn in range(rounds):
            for name in ("without", "each epoch") if turn % 2 else ("each epoch", "without"):
                seconds, writing = run(
                    data, *(["--checkpoint-every", "epoch"] * (name != "without"))
                )
                found[name].append(seconds)
                if name != "without":
                    found["of it, writing"].append(writing)
    return found


def agree(rounds: int) -> None:
    """One of two ranks: train epochs with the guard and without, and print seconds on rank 0."""
    import torch

    from jobkit.payload.clock import Stages
    from jobkit.payload.guard.consensus import Consensus, JobGuard
    from jobkit.payload.guard.stopping import StopRequest
    from jobkit.payload.job import RankJob
    from jobkit.payload.place import read_rank_env
    from jobkit.payload.report import Reporter
    from jobkit.payload.run import _set_up
    from jobkit.spec.runspec import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec(
        ranks_per_node=2, strategy="ddp", model="mlp", dataset="synthetic", train_samples=4096,
        test_samples=10, global_batch_size=16, threads=1, lr=0.01, warmup_iterations=0,
    )  # fmt: skip
    job = RankJob(spec=spec, place=read_rank_env(), paths=None, dry_run=True)
    trainer = _set_up(job, Reporter(None, 0, 1), Stages(imported_s=0.0))
    consensus = Consensus(trainer.group.on_cpu())
    guard = JobGuard(
        consensus=consensus, stop=StopRequest(), watchdog=None, checkpoints=None, fault=None
    )
    found: dict[str, list[float]] = {"alone": [], "agreeing": []}
    for turn in range(rounds + 1):
        for name in ("alone", "agreeing") if turn % 2 else ("agreeing", "alone"):
            trainer.guard = guard if name == "agreeing" else None
            trainer.group.gather(None)
            begin = time.perf_counter()
            trainer.train_epoch(turn, lambda _: None)
            consensus.settle()
            if turn:  # the first warms up
                found[name].append((time.perf_counter() - begin) / len(trainer.batches))
    if job.place.rank == 0:
        print(json.dumps(found), flush=True)
    trainer.group.close()
    os._exit(0)


def agreement(rounds: int) -> dict[str, list[float]]:
    """Seconds of an iteration at two ranks, with the agreement and without, round by round."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**ENV, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}"}
    words = [__file__, "--agree", "--rounds", str(rounds)]
    done = subprocess.run([*launch, *words], check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--agree", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agree:
        agree(args.rounds)
    runs = cost(args.rounds)
    for name, values in runs.items():
        print(f"run, {EPOCHS} epochs: {name:16} {median(values):8.3f} s")
    share = ratio(runs["each epoch"], runs["without"])
    verdict = ["missed", "reached"][share <= MOST]
    print(f"checkpoint each epoch / without {share:9.3f}  to reach {MOST:g}: {verdict}")
    written = ratio(runs["of it, writing"], runs["each epoch"])
    print(f"writing checkpoints / run       {written:9.4f}")
    ranks = agreement(args.rounds)
    for name, values in ranks.items():
        print(f"iteration at 2 ranks, {name:10} {median(values) * 1e6:8.0f} us")
    print(f"agreeing / alone                {ratio(ranks['agreeing'], ranks['alone']):9.3f}")


if __name__ == "__main__":
    main()
