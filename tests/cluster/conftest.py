"""A real Slurm for the tests: `cluster` for the whole session, `make_cluster` for one of one's own.

Where Slurm cannot be brought up, the tests fail in CI, and skip with the reason elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from minicluster import machine, slurm
from minicluster.config import Options
from minicluster.layout import Layout
from support import needs
from support.place import ROOT

DOOR = [sys.executable, str(ROOT / "hpc" / "minicluster")]
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip


class Ended(NamedTuple):
    """How a job ended; for an array, what its elements have in common, else joined by commas."""

    state: str
    exit_code: str  # "code:signal"


@dataclass
class Cluster:
    """A minicluster that is up."""

    layout: Layout
    env: dict[str, str] = field(repr=False)  # for subprocess: points Slurm's commands at it
    printed: str = ""  # what `up` said

    def door(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `hpc/minicluster <words>` for this cluster."""
        return run_door(*words, directory=self.layout.root)

    def run(
        self, *argv: str | os.PathLike[str], timeout: float = 480, cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command on the login node, so to say; `env` is added to the environment."""
        return subprocess.run(
            argv, env=self.env | (env or {}), cwd=cwd, timeout=timeout, capture_output=True,
            text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def submit(self, *words: str, cwd: Path | None = None) -> str:
        """sbatch; returns the job's id."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job_id: str | int) -> list[dict[str, str]]:
        """The fields of `scontrol show job`: one dictionary for each element of an array.

        Empty where it did not answer. Of a job that slurmctld has forgotten, which it does
        MinJobAge after its end, there is only what sacct has: JobState and ExitCode.
        """
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
        if "Invalid job id" not in shown.stderr:
            lines = shown.stdout.splitlines()
            return [dict(re.findall(r"(?:^| )(\w[\w:/]*)=(\S*)", line)) for line in lines]
        rows = self.run("sacct", "-nPX", "-j", str(job_id), "--format=State,ExitCode").stdout
        both = (row.split("|") for row in rows.splitlines())
        return [{"JobState": state.split()[0], "ExitCode": code} for state, code in both]

    def wait(self, job_id: str | int, timeout: float = 720) -> Ended:
        """Wait until the job, or every element of the array, has ended."""
        deadline = time.monotonic() + timeout
        while True:
            jobs = self.show(job_id)
            states = {job["JobState"] for job in jobs}
            if jobs and states <= ENDED:
                codes = {job["ExitCode"] for job in jobs}
                return Ended(",".join(sorted(states)), ",".join(sorted(codes)))
            assert time.monotonic() < deadline, f"job {job_id} has not ended: {jobs}"
            time.sleep(0.25)

    def wait_all(self, job_ids: list[str], timeout: float = 960) -> set[Ended]:
        """Wait until all these jobs have ended; return how."""
        return {self.wait(job_id, timeout) for job_id in job_ids}

    def wait_for(self, job_id: str | int, timeout: float = 720, **fields: str) -> dict[str, str]:
        """Wait until the job's record has these fields, such as JobState="RUNNING"."""
        deadline = time.monotonic() + timeout
        while True:
            jobs = self.show(job_id)
            if jobs and fields.items() <= jobs[0].items():
                return jobs[0]
            assert time.monotonic() < deadline, f"job {job_id} is not {fields}: {jobs}"
            time.sleep(0.25)


def run_door(
    *words: str, directory: Path, timeout: float = 480
) -> subprocess.CompletedProcess[str]:
    """Run `hpc/minicluster <words> --dir <directory>`."""
    return subprocess.run(
        [*DOOR, *words, "--dir", str(directory)],
        capture_output=True, text=True, check=False, timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Slurm is installed."""
    needs.require(*machine.packages(Options(netns=True)))


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """A folder with a path that is short enough for Slurm's sockets, readable by all."""
    made = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))
    made.chmod(0o755)
    # Its standard input ends with this process, even by KILL; a Ctrl-C is not for it.
    watcher = [sys.executable, str(ROOT / "tests" / "cluster" / "watcher.py"), str(made)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        watcher, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    ):
        yield made
        shutil.rmtree(made)


@pytest.fixture(scope="session")
def make_cluster(slurm_packages: None, short_dir: Path) -> Iterator[Callable[..., Cluster]]:
    """Bring up a cluster with the options of `up`; all are taken down at the end."""
    made: list[Path] = []

    def make(*options: str) -> Cluster:
        layout = Layout(short_dir / f"c{len(made)}")
        made.append(layout.root)
        done = run_door("up", *options, directory=layout.root)
        if done.returncode:
            words = " ".join(["up", *options])
            needs.unavailable(f"`{words}` ended with {done.returncode}: {done.stderr}")
        return Cluster(layout, slurm.environment(layout), done.stdout)

    yield make
    for directory in made:
        done = run_door("down", directory=directory)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """The session's cluster: 4 nodes (n1 to n4) of 8 cores and 4 GPUs, with accounting."""
    return make_cluster()


@pytest.fixture(scope="session")
def door(slurm_packages: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`hpc/minicluster <words> --dir <directory>`, for tests of the command itself."""
    return run_door
