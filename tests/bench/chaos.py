"""A study on a Slurm on which ranks and nodes are killed at random, resubmitted until it is done.

    python tests/bench/chaos.py --runs 20 --kills 20 --seed 1

Brings up a minicluster, runs the study undisturbed, then again (the same specs, another
folder) while a monkey kills; `python run_benchmarks.py` is called again until nothing is left to
start. Prints its figures as JSON. Ends with 0 where every planned run is a
row that is ok and each epoch's losses are the undisturbed study's, to the last bit; with 4 else.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench import ROOT

Env = dict[str, str]
NODES = ("n1", "n2", "n3", "n4")
STUDY = ["--study", "demo", "--strategies", "ddp", "--gpus", "2x1", "--threads", "1"]
STUDY += ["--train-samples", "2000", "--test-samples", "256", "--global-batch-size", "64"]
STUDY += ["--epochs", "2", "--checkpoint-every", "8", "--max-running", "3"]
MOST_LAUNCHES = 20
EXACT = ("train_loss", "val_loss", "val_accuracy")


def python(*words: str, env: Env) -> "subprocess.CompletedProcess[str]":
    """Run jobkit's Python with these words, in the repository."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


class Monkey(threading.Thread):
    """Kills a rank or a node every few seconds, until its kills are used up or it is stopped."""

    def __init__(self, env: Env, draw: random.Random, kills: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.env, self.draw, self.left, self.every_s = env, draw, kills, every_s
        self.ranks = self.nodes = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while self.left and not self.stopped.wait(self.draw.expovariate(1 / self.every_s)):
            self.left -= self._node() if self.draw.random() < 0.25 else self._rank()

    def _rank(self) -> int:
        """SIGKILL to one process of a run; how many were killed."""
        pids = ranks_of(self.env["SLURM_CONF"])
        if not pids:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.draw.choice(pids), signal.SIGKILL)
        self.ranks += 1
        return 1

    def _node(self) -> int:
        """A node goes with all that runs on it, and is back a few seconds later."""
        node = self.draw.choice(NODES)
        if door(self.env, "kill", node, "--jobs").returncode:
            return 0
        self.nodes += 1
        self.stopped.wait(self.draw.uniform(1, 30))
        door(self.env, "start", node)
        return 1


def door(env: Env, *words: str) -> "subprocess.CompletedProcess[str]":
    """`hpc/minicluster words` for the cluster of this environment."""
    return python("hpc/minicluster", *words, env=env)


def ranks_of(slurm_conf: str) -> list[int]:
    """The processes that train on the cluster."""
    found = []
    for folder in sorted(Path("/proc").glob("[0-9]*")):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={slurm_conf}\0".encode() in (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if ours and b"jobkit.payload.main" in words and b"srun" not in words[0]:
            found.append(int(folder.name))
    return found


def bring_up(folder: Path) -> dict[str, str]:
    """A minicluster; return the environment that points at it, and at our own logs."""
    own = {**os.environ, "JOBKIT_LOGS": str(folder / "logs")}
    done = python("hpc/minicluster", "up", "--dir", str(folder / "c"), env=own)
    if done.returncode:
        sys.exit(done.stderr)
    lines = python("hpc/minicluster", "env", "--dir", str(folder / "c"), env=own).stdout
    pairs = (line.removeprefix("export ").partition("=") for line in lines.splitlines())
    return own | {name: value for name, _, value in pairs}


def launch(env: Env, name: str, runs: int) -> "subprocess.CompletedProcess[str]":
    """`python run_benchmarks.py`, until its jobs have ended."""
    words = [*STUDY, "--repeats", str(runs), "--name", name, "--no-collect"]
    return python("run_benchmarks.py", *words, env=env)


def table(env: Env, name: str, file: str) -> list[dict[str, str]]:
    """A CSV file of a study, collected anew."""
    python("collect_results.py", name, env=env)
    with (Path(env["JOBKIT_LOGS"]) / name / file).open() as stream:
        return list(csv.DictReader(stream))


def losses(env: Env, name: str) -> dict[tuple[str, str], list[str]]:
    """What each run measured in each epoch, as it was written."""
    rows = table(env, name, "epochs.csv")
    return {(r["run_id"], r["epoch"]): [r[column] for column in EXACT] for r in rows}


def chaos(env: Env, runs: int, kills: int, every_s: float, seed: int) -> dict[str, object]:
    """Run both studies; return the figures."""
    calm = launch(env, "calm", runs)
    if calm.returncode:
        sys.exit(calm.stdout + calm.stderr)
    monkey, launches = Monkey(env, random.Random(seed), kills, every_s), 0
    monkey.start()
    try:
        while launches < MOST_LAUNCHES:
            launches += 1
            if launch(env, "chaos", runs).returncode == 0:
                break
    finally:
        monkey.stopped.set()
        monkey.join()
    rows, expected = table(env, "chaos", "results.csv"), losses(env, "calm")
    return {
        "runs_planned": runs,
        "rows": len(rows),
        "rows_ok": sum(row["status"] == "ok" for row in rows),
        "ranks_killed": monkey.ranks,
        "nodes_killed": monkey.nodes,
        "launches": launches,
        "attempts": sum(int(row["attempts"]) for row in rows),
        "epochs": len(expected),
        "same_losses": losses(env, "chaos") == expected,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20, help="ranks and nodes in all (default 20)")
    parser.add_argument("--every", type=float, default=10, metavar="S", help="mean time between")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
    folder.chmod(0o755)
    env = bring_up(folder)
    try:
        found = chaos(env, args.runs, args.kills, args.every, args.seed)
    finally:
        door(env, "down")
        shutil.rmtree(folder)
    print(json.dumps(found, indent=1))
    good = found["rows_ok"] == found["rows"] == args.runs and found["same_losses"]
    return 0 if good else 4


if __name__ == "__main__":
    sys.exit(main())
