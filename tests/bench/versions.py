"""This checkout against another commit: `python tests/bench/versions.py REV`.

Both train the same runs on the CPU, in alternating order: single on one rank, ddp and fsdp on two.
The parameters of both are compared bit for bit; of the rate and of the CPU time of all ranks the
medians of the ratios of each round are printed, this checkout's over the other's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from throughput import ROOT
from torch import Tensor

RUNS = {"single": 1, "ddp": 2, "fsdp": 2}  # ranks
HOW = ["--dataset", "synthetic", "--test-samples", "512", "--epochs", "2", "--lr", "0.01"]
HOW += ["--device", "cpu", "--checkpoint-every", "epoch", "--breakdown-iterations", "0"]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]


def unpacked(rev: str, folder: Path) -> Path:
    """The files of a commit; ends with git's message where there is none."""
    command = ["git", "-C", str(ROOT), "archive", rev]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        sys.exit(f"versions.py: {rev}: {done.stderr.decode().strip()}; give a commit")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def train(version: Path, strategy: str, samples: int, data: str) -> tuple[float, float, Path]:
    """Images per second, CPU seconds of all ranks, and the folder of the run, by one version."""
    run = Path(tempfile.mkdtemp(dir=data)) / "run"
    words = ["-m", "jobkit.payload.main", "--strategy", strategy, *HOW, "--data-dir", data]
    words += ["--train-samples", str(samples), "--run-dir", str(run)]
    ranks = RUNS[strategy]
    start = [*LAUNCH, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "PYTHONPATH": str(version / "src")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *start, *words], check=True, env=env, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = [json.loads(line) for line in (run / "metrics" / "0.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "epoch"][-1]["images_per_s"], seconds, run


def parameters(run: Path) -> dict[str, Tensor]:
    """The parameters of the newest checkpoint, by name."""
    reader = dcp.FileSystemReader(max((run / "checkpoints").glob("[0-9]*")))
    entries = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def different(own: Path, other: Path) -> list[str]:
    """The names of the parameters that differ in any bit."""
    ours, theirs = parameters(own), parameters(other)
    same = {n for n in ours.keys() & theirs.keys() if torch.equal(ours[n], theirs[n])}
    return sorted((ours.keys() | theirs.keys()) - same)


def compare(strategy: str, versions: list[Path], rounds: int, samples: int, data: str) -> bool:
    """Print what a strategy gives with both versions; whether the parameters are the same."""
    rates, times, unlike = list[float](), list[float](), set[str]()
    for turn in range(rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        found = {i: train(versions[i], strategy, samples, data) for i in order}
        rates.append(found[0][0] / found[1][0])
        times.append(found[0][1] / found[1][1])
        unlike.update(different(found[0][2], found[1][2]))
    bits = f"differ: {', '.join(sorted(unlike))}" if unlike else "the same bits"
    ratios = f"rate {median(rates):.3f}  CPU time {median(times):.3f}"
    print(f"{strategy:7} {RUNS[strategy]} ranks  {ratios}  parameters: {bits}", flush=True)
    return not unlike


def main() -> int:
    """Compare; 1 where parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--train-samples", type=int, default=5000, help="(default 5000)")
    parser.add_argument("--strategies", nargs="+", choices=[*RUNS], default=[*RUNS])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as data:
        versions = [ROOT, unpacked(args.rev, Path(folder))]
        same = [
            compare(strategy, versions, args.rounds, args.train_samples, data)
            for strategy in args.strategies
        ]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
