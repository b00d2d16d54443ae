"""What the tests on a real Slurm share: a checkout as a user has it, and what jobs left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.paths import RunPaths
from support.place import ROOT

# Data that every run can make for itself in a second.
TINY = ["--dataset", "synthetic", "--train-samples", "512", "--test-samples", "256"]
TINY += ["--epochs", "1", "--global-batch-size", "128", "--threads", "1"]
TINY += ["--why", "0"]


@dataclass(frozen=True)
class Checkout:
    """A folder with run.sh and what it needs, from which a user submits."""

    folder: Path
    data: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "JOBKIT_DATA_DIR": str(self.data),
            "JOBKIT_LOGS": str(self.folder / "logs"),
        }

    def python(self, cluster: Any, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        own = {**self.env, "PYTHONPATH": str(self.folder / "src"), **env}
        return cluster.run(sys.executable, *words, cwd=self.folder, env=own)

    def bench(self, cluster: Any, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.python(cluster, "run_benchmarks.py", *words, **env)

    def start(self, cluster: Any, name: str, *words: str, **env: str) -> list[str]:
        """Start a study that nobody waits for; the ids of its jobs."""
        done = self.bench(cluster, "--name", name, "--no-wait", *words, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"\d+", re.search(r"started: Slurm jobs? (.*)", done.stdout)[1])

    def sbatch(self, cluster: Any, *words: str, **env: str) -> str:
        done = cluster.run("sbatch", "--parsable", *words, cwd=self.folder, env=self.env | env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def runs(self, name: str) -> list[RunPaths]:
        found = sorted((self.folder / "logs" / name).glob("*/submission.json"))
        return [RunPaths(path.parent) for path in found]

    def statuses(self, cluster: Any, name: str) -> dict[str, str]:
        said = self.python(cluster, "-m", "jobkit", "status", name, "--json")
        return {row["run_id"]: row["status"] for row in json.loads(said.stdout)["runs"]}

    def log(self, job_id: str) -> str:
        logs = self.folder / "logs"
        return "".join(path.read_text() for path in sorted(logs.glob(f"train-{job_id}.*")))


def make_checkout(folder: Path, data: Path) -> Checkout:
    """Copy what a user has, without what is large: the source is linked."""
    (folder / "logs").mkdir(parents=True)
    doors = ("run_benchmarks.py", "collect_results.py", "plot_results.py", "plot_results.sh")
    for name in ("run.sh", *doors):
        shutil.copy2(ROOT / name, folder / name)
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "hpc").symlink_to(ROOT / "hpc")
    return Checkout(folder, data)
