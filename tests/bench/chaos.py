"""A study on a Slurm on which ranks, nodes and commands are killed at random, until it is done.

    python tests/bench/chaos.py --runs 20 --kills 20 --commands 20 --seed 1

Brings up a minicluster and runs the study undisturbed. Runs it again (the same specs, another
folder) while a monkey kills ranks and nodes; `python run_benchmarks.py` is called again until
nothing is left to start. Then a third time, in which the commands themselves are killed: launch,
status, collect, plot, cancel; after each no file of the study may be torn. Prints its figures as
JSON. Ends with 0 where every planned run is a row that is ok, each epoch's losses are the
undisturbed study's, to the last bit, and nothing was torn; with 4 else.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from bench import ROOT
from jobkit.processes import environments
from minicluster import cluster as clusters
from minicluster.config import Cluster
from minicluster.daemons import Starter
from minicluster.processes import end

STUDY = ["--study", "demo", "--strategies", "ddp", "--gpus", "2x1", "--threads", "1"]
STUDY += ["--train-samples", "2000", "--test-samples", "256", "--global-batch-size", "64"]
STUDY += ["--epochs", "2", "--checkpoint-every", "8", "--max-running", "3"]
MOST_LAUNCHES = 20
EXACT = ("train_loss", "val_loss", "val_accuracy")


def python(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of the repository."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


class Monkey(threading.Thread):
    """Kills a rank or a node every few seconds, until its kills are used up or it is stopped."""

    def __init__(self, cluster: Cluster, draw: random.Random, kills: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.cluster, self.root, self.draw = cluster, cluster.root, draw
        self.left, self.every_s = kills, every_s
        self.ranks = self.nodes = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while self.left and not self.stopped.wait(self.draw.expovariate(1 / self.every_s)):
            if self.draw.random() < 0.25:
                self._node()
            elif pids := ranks_of(self.root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draw.choice(pids), signal.SIGKILL)
                    self.ranks, self.left = self.ranks + 1, self.left - 1

    def _node(self) -> None:
        """A node goes with all that runs on it, and is back a few seconds later."""
        node = f"n{self.draw.randint(1, 4)}"
        end(self.root, 0.0, lambda member: member.node == node)
        self.nodes, self.left = self.nodes + 1, self.left - 1
        self.stopped.wait(self.draw.uniform(1, 30))
        Starter(self.cluster).start_slurmds([node])


def ranks_of(root: Path) -> list[int]:
    """The processes that train on the cluster."""
    ours = [pid for pid, env in environments() if env.get("SLURM_CONF") == f"{root}/slurm.conf"]
    found = []
    for pid in ours:
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] * (b"jobkit.payload.main" in words and b"srun" not in words[0])
    return sorted(found)


def table(name: str, file: str) -> list[dict[str, str]]:
    """A CSV file of a study, collected anew."""
    python("collect_results.py", name)
    with (Path(os.environ["JOBKIT_LOGS"]) / name / file).open() as stream:
        return list(csv.DictReader(stream))


def losses(name: str) -> dict[tuple[str, str], list[str]]:
    """What each run measured in each epoch, as it was written."""
    rows = table(name, "epochs.csv")
    return {(r["run_id"], r["epoch"]): [r[column] for column in EXACT] for r in rows}


def until_done(words: list[str], name: str) -> dict[str, int]:
    """Launch a study until all its runs are ok; return what became of it."""
    rows: list[dict[str, str]] = []
    launches = 0
    while launches < MOST_LAUNCHES and not (rows and all(r["status"] == "ok" for r in rows)):
        time.sleep(min(launches, 1) * 10)  # it follows its own jobs, not those of a killed launch
        python(*words, name)
        rows, launches = table(name, "results.csv"), launches + 1
    return {
        "rows": len(rows),
        "rows_ok": sum(row["status"] == "ok" for row in rows),
        "launches": launches,
        "attempts": sum(int(row["attempts"]) for row in rows),
        "same_losses": losses(name) == losses("calm"),
    }


def torn(folder: Path) -> Counter[str]:
    """The names of files of a study that somebody would read and that are not whole."""
    found = Counter[str]()
    for path in folder.rglob("*.*"):
        try:
            text = path.read_text() if path.suffix in (".json", ".csv", ".html", ".svg") else ""
            if path.suffix == ".json":
                json.loads(text)
            elif path.suffix == ".csv":
                head, *rows = csv.reader(text.splitlines())
                found[path.name] += any(len(row) != len(head) for row in rows) or text[-1] != "\n"
            elif path.suffix in (".html", ".svg"):
                found[path.name] += not text.rstrip().endswith(("</html>", "</svg>"))
        except FileNotFoundError:
            continue  # a job is at work on its own files
        except ValueError:
            found[path.name] += 1
    return +found


def kill_commands(launch: list[str], kills: int, draw: random.Random) -> dict[str, object]:
    """Kill commands of the study "commands" at a random moment of the time that they take."""
    name, folder = "commands", Path(os.environ["JOBKIT_LOGS"]) / "commands"
    ways = {
        "launch": [*launch, name],
        "status": ["-m", "jobkit", "status", name],
        "collect": ["collect_results.py", name],
        "plot": ["plot_results.py", name],
        "cancel": ["-m", "jobkit", "cancel", name],
    }
    killed, broken = Counter[str](), Counter[str]()
    takes = dict.fromkeys(ways, 6.0)  # seconds; a launch waits for its jobs: the first of it count
    while killed.total() < kills:
        way, begin = draw.choice([*ways]), time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *ways[way]], cwd=ROOT, stdin=-3, stdout=-3, stderr=-3,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(draw.uniform(0, takes[way]))
            takes[way] = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            killed[way] += 1
        process.wait()
        broken += torn(folder)
    return {f"{way}_killed": killed[way] for way in ways} | {"torn": broken}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20, help="ranks and nodes in all (default 20)")
    parser.add_argument("--commands", type=int, default=20, help="kills of commands (default 20)")
    parser.add_argument("--every", type=float, default=10, metavar="S", help="mean time between")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with clusters.temporary("chaos") as cluster, tempfile.TemporaryDirectory() as logs:
        os.environ["JOBKIT_LOGS"] = logs
        launch = ["run_benchmarks.py", *STUDY, "--repeats", str(args.runs), "--name"]
        calm = python(*launch, "calm")
        if calm.returncode:
            sys.exit(calm.stdout + calm.stderr)
        monkey = Monkey(cluster, random.Random(args.seed), args.kills, args.every)
        monkey.start()
        try:
            chaos = until_done(launch, "chaos")
        finally:
            monkey.stopped.set()
            monkey.join()
        chaos |= {"ranks_killed": monkey.ranks, "nodes_killed": monkey.nodes}
        commands = kill_commands(launch, args.commands, random.Random(args.seed))
        commands |= until_done(launch, "commands")
    print(json.dumps({"runs": args.runs, "chaos": chaos, "commands": commands}, indent=1))
    good = not commands["torn"]
    for found in (chaos, commands):
        good &= found["rows_ok"] == found["rows"] == args.runs and found["same_losses"] is True
    return 0 if good else 4


if __name__ == "__main__":
    sys.exit(main())
