"""What the tests of jobs share: a checkout as a user has it, and what a job left behind."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from jobkit.metric.reader import read_file
from support.place import ROOT

# Data that every run can make for itself in a second.
TINY = ["--dataset", "synthetic", "--train-samples", "512", "--test-samples", "256"]
TINY += ["--epochs", "1", "--global-batch-size", "128", "--threads", "1"]
TINY += ["--breakdown-iterations", "0"]


@dataclass(frozen=True)
class Checkout:
    """A folder with run.sh and what it needs, from which a user submits."""

    folder: Path
    data: Path

    @property
    def env(self) -> dict[str, str]:
        """What the user has set: the Python of the tests, and a place for data and logs."""
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "JOBKIT_DATA_DIR": str(self.data),
            "JOBKIT_LOGS": str(self.folder / "logs"),
        }

    def sbatch(self, cluster, *words: str, **env: str) -> str:
        """Submit from the checkout; return the job's id."""
        done = cluster.run("sbatch", "--parsable", *words, cwd=self.folder, env=self.env | env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self, job_id: str) -> str:
        """What the job printed, and what it complained of."""
        logs = self.folder / "logs"
        return "".join(path.read_text() for path in sorted(logs.glob(f"train-{job_id}.*")))

    def records(self, job_id: str, kind: str) -> list[dict]:
        """The records of one kind that a single job left."""
        path = self.folder / "logs" / "single" / f"job-{job_id}" / "metrics" / "0.jsonl"
        return records(path, kind)


def records(path: Path, kind: str) -> list[dict]:
    """The records of one kind in a metrics file."""
    with path.open("rb") as stream:
        return [r for r in read_file(stream) if isinstance(r, dict) and r["kind"] == kind]


def make_checkout(folder: Path, data: Path) -> Checkout:
    """Copy what a user has, without what is large: the source is linked."""
    (folder / "logs").mkdir(parents=True)
    for name in ("run.sh", "run_benchmarks.py", "collect_results.py", "plot_results.sh"):
        shutil.copy2(ROOT / name, folder / name)
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "hpc").symlink_to(ROOT / "hpc")
    return Checkout(folder, data)
