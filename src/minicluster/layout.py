"""The only owner of file names and port numbers of a minicluster."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from minicluster.errors import UsageError

DIR_VARIABLE = "JOBKIT_MINICLUSTER_DIR"
PORTS_PER_BLOCK = 400  # 256 nodes, and from 300 on srun's
MAX_NODES = 256
MAX_NODES_NETNS = 253  # addresses of a /24, less the bridge's
# slurmstepd makes the socket <folder>/spool/<node>/<node>_<job>.<step>, and a socket's path is at
# most 107 bytes long.
_LONGEST_SOCKET = f"/spool/n{MAX_NODES}/n{MAX_NODES}_4294967295.4294967295"
MAX_ROOT_BYTES = 107 - len(_LONGEST_SOCKET)


def default_root() -> Path:
    """The folder of this user's cluster: the one that `env` named, else one under /tmp.

    /tmp, because it is short, on a local disk, and open to other users of a root's cluster.
    """
    named = os.environ.get(DIR_VARIABLE)
    return Path(named) if named else Path(f"/tmp/jobkit-minicluster-{os.getuid()}")


def check_root(text: str | os.PathLike[str]) -> Path:
    """The folder's absolute path, or UsageError where Slurm could not live in it."""
    root = Path(text).expanduser().resolve()
    if not re.fullmatch(r"(/[A-Za-z0-9_.+-]+)+", str(root)):
        raise UsageError(
            f"--dir {str(root)!r}: Slurm's files cannot hold this path; "
            "use letters, digits and _ . + - only (no spaces), for example --dir /tmp/mc"
        )
    if len(os.fsencode(root)) > MAX_ROOT_BYTES:
        raise UsageError(
            f"--dir {root}: {len(os.fsencode(root))} bytes are too long for the Unix sockets under "
            f"it (at most {MAX_ROOT_BYTES}); use a shorter one, for example --dir /tmp/mc"
        )
    return root


@dataclass(frozen=True)
class Layout:
    """Where everything of the cluster in the folder `root` lies."""

    root: Path

    @property
    def state_file(self) -> Path:
        """What `up` made, as JSON; also the mark by which a folder is known to be ours."""
        return self.root / "minicluster.json"

    @property
    def state_file_beside(self) -> Path:
        """Where the state file is written before it is given its name."""
        return self.root / "minicluster.tmp"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.root / "slurmdbd.conf"

    @property
    def munge_key(self) -> Path:
        return self.root / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.sock"

    @property
    def hosts(self) -> Path:
        """What jobs see as /etc/hosts."""
        return self.root / "hosts"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def database_sql(self) -> Path:
        return self.root / "db-init.sql"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def controller_state(self) -> Path:
        return self.root / "state"

    @property
    def devices(self) -> Path:
        """The simulated GPUs."""
        return self.root / "dev"

    def output(self, name: str) -> Path:
        """What the daemon `name` writes to its standard output and error."""
        return self.log / f"{name}.out"

    @property
    def tag(self) -> str:
        """Eight characters that differ between folders: in the names of network links."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]


@dataclass(frozen=True)
class Ports:
    """A cluster's ports: the block from `base` on, which nothing else of ours uses."""

    base: int

    @property
    def slurmctld(self) -> int:
        return self.base

    @property
    def slurmdbd(self) -> int:
        return self.base + 1

    @property
    def mariadb(self) -> int:
        return self.base + 2

    def slurmd(self, index: int) -> int:
        """The port of node number `index`, counted from 1."""
        return self.base + 10 + index

    @property
    def steps(self) -> str:
        """What `srun --resv-ports` hands out: not shared with another cluster on this machine."""
        return f"{self.base + 300}-{self.base + PORTS_PER_BLOCK - 1}"

    def used(self, nodes: int) -> list[int]:
        """Every port that a daemon will listen on."""
        own = [self.slurmctld, self.slurmdbd, self.mariadb]
        return own + [self.slurmd(index) for index in range(1, nodes + 1)]
