"""A real Slurm for the tests. Without it they fail in CI, and skip with the reason elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minicluster import config, machine
from minicluster.daemons import Starter
from minicluster.processes import end
from support import needs
from support.checkout import Checkout, make_checkout
from support.place import ROOT, until

DOOR = [sys.executable, str(ROOT / "hpc" / "minicluster")]
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
# Root's cluster has what any test asks for. Without root a node has no address of its own, and
# there are no accounts, as the accounting knows root only. A rank with torch has 500 MiB and more.
OPTIONS = ["--preemption", "--memory-limits", "--memory=64000"]
OPTIONS += ["--enforce"] if os.geteuid() == 0 else []
# Ends the clusters of a folder once nobody writes to its standard input any more.
TAKE_DOWN = f'cat; for root in "$0"/*; do {machine.DIR_VARIABLE}="$root" "$@" down; done; '
TAKE_DOWN += 'rm -rf "$0"'


@dataclass
class Cluster:
    root: Path
    env: dict[str, str] = field(repr=False)  # for subprocess: points Slurm's commands at it
    printed: str = ""  # what `up` said

    def link(self, node: str, state: str) -> None:
        """Take a node's link down, or up again (root's cluster has them)."""
        name = machine.link_of(self.root, node)
        subprocess.run([machine.command("ip"), "link", "set", name, state], check=True)

    def kill(self, node: str, jobs: bool) -> int:
        """SIGKILL the node's slurmd, and what runs on it too (jobs); return how many processes."""
        return end(
            self.root, 0.0, lambda m: m.node == node and (jobs or m.name == f"slurmd.{node}")
        )

    def start(self, node: str) -> None:
        """Start the node's slurmd, as `up` did, and wait until Slurm has the node."""
        Starter(config.Cluster.load(self.root)).start_slurmds([node])

        def serves() -> bool:
            shown = machine.node_states(self.root).get(node, "down")
            return not shown.startswith(("down", "drain")) and "*" not in shown  # *: no answer

        until(serves, f"{node} is back")

    def run(self, *argv, timeout=900, cwd=None, env=None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.env | (env or {}), cwd=cwd, timeout=timeout, capture_output=True,
            text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def submit(self, *words: str) -> str:
        done = self.run("sbatch", "--parsable", "--output=/dev/null", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job_id: str) -> list[dict[str, str]]:
        """The fields of `scontrol show job`: one dictionary for each element of an array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return [dict(re.findall(r"(?:^| )(\w[\w:/]*)=(\S*)", line)) for line in shown.splitlines()]

    def wait(self, job_id: str) -> tuple[str, str]:
        """Wait until the job, or every element of the array, has ended: state, and code:signal."""
        jobs: list[dict[str, str]] = []

        def ended() -> bool:
            jobs[:] = self.show(job_id)
            return bool(jobs) and {job["JobState"] for job in jobs} <= ENDED

        until(ended, f"the end of job {job_id}")
        states, codes = (sorted({job[name] for job in jobs}) for name in ("JobState", "ExitCode"))
        return ",".join(states), ",".join(codes)

    def running(self, job_id: str) -> dict[str, str]:
        until(lambda: self.show(job_id)[0]["JobState"] == "RUNNING", f"the start of job {job_id}")
        return self.show(job_id)[0]


def run_door(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOOR, *words], env={**os.environ, machine.DIR_VARIABLE: str(directory)},
        capture_output=True, text=True, check=False, timeout=480, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    needs.require(*machine.PACKAGES)


@pytest.fixture(scope="session")
def as_root() -> None:
    """For what only root's cluster has: addresses of the nodes, accounts, jobs of other users."""
    if os.geteuid() != 0:
        needs.unavailable("this needs root")


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """A folder with a path that is short enough for Slurm's sockets, readable by all."""
    made = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))
    made.chmod(0o755)
    # Its standard input ends with this process, even by KILL; a Ctrl-C is not for it.
    watcher = ["sh", "-c", TAKE_DOWN, str(made), *DOOR]
    with subprocess.Popen(watcher, stdin=-1, stdout=-3, stderr=-3, start_new_session=True):
        yield made
        shutil.rmtree(made)


@pytest.fixture(scope="session")
def cluster(slurm_packages: None, short_dir: Path) -> Iterator[Cluster]:
    """The session's cluster: 4 nodes (n1 to n4) of 64 cores and 4 GPUs, with accounting."""
    root = short_dir / "c"
    done = run_door("up", *OPTIONS, directory=root)
    if done.returncode:
        needs.unavailable(f"`up` ended with {done.returncode}: {done.stderr}")
    yield Cluster(root, machine.environment(root), done.stdout)
    done = run_door("down", directory=root)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout from which jobs and studies are submitted, in a path with a space and a quote."""
    folder = tmp_path_factory.mktemp("cluster")
    return make_checkout(folder / "my job's kit", folder / "data")


@pytest.fixture(scope="session")
def door(slurm_packages: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    return run_door
