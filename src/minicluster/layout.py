"""File names and port numbers of a minicluster, its errors, and who may own its folder."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

DIR_VARIABLE = "JOBKIT_MINICLUSTER_DIR"
PORTS_PER_BLOCK = 400  # 256 nodes, and from 300 on srun's
MAX_NODES = 256
MAX_NODES_NETNS = 253  # addresses of a /24, less the bridge's
# slurmstepd makes the socket <folder>/spool/<node>/<node>_<job>.<step>, and a socket's path is at
# most 107 bytes long.
MAX_ROOT_BYTES = 107 - len(f"/spool/n{MAX_NODES}/n{MAX_NODES}_4294967295.4294967295")


class ClusterError(Exception):
    """Something failed on this machine: exit 1."""

    code = 1


class UsageError(ClusterError):
    """What the user asked for cannot be done as asked: exit 2, nothing was started."""

    code = 2


def default_root() -> Path:
    """The folder of this user's cluster: the one that `env` named, else one under /tmp.

    /tmp, because it is short, on a local disk, and open to other users of a root's cluster.
    """
    return Path(os.environ.get(DIR_VARIABLE) or f"/tmp/jobkit-minicluster-{os.getuid()}")


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


class Layout:
    """Where everything of the cluster in the folder `root` lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # What `up` made, as JSON; also the mark by which a folder is known to be ours.
        self.state_file = root / "minicluster.json"
        self.state_file_beside = root / "minicluster.tmp"  # before it has its name
        self.slurm_conf = root / "slurm.conf"
        self.slurmdbd_conf = root / "slurmdbd.conf"
        self.hosts = root / "hosts"  # what jobs see as /etc/hosts
        self.run = root / "run"
        self.log = root / "log"
        self.spool = root / "spool"
        self.controller_state = root / "state"
        self.devices = root / "dev"  # the simulated GPUs
        self.database = root / "db"
        self.database_sql = root / "db-init.sql"
        self.munge_key = root / "munge.key"
        self.munge_socket = self.run / "munge.sock"
        # Eight characters that differ between folders, for the names of network links.
        self.tag = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]

    def output(self, name: str) -> Path:
        """What the daemon `name` writes to its standard output and error."""
        return self.log / f"{name}.out"


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
        daemons = [self.slurmctld, self.slurmdbd, self.mariadb]
        return daemons + [self.slurmd(index) for index in range(1, nodes + 1)]


def check_owner(root: Path, reading: bool = False) -> None:
    """Raise UsageError where somebody else owns the folder, may write into it, or exchange it:
    what lies in it is executed, by root where root made it.

    reading: a folder of root's is fine too. Above it lie folders that nobody else may write to,
    but those in which each user removes only files of their own (/tmp).
    """
    check_entry(root, reading)
    trusted = {0, os.geteuid(), int(os.environ.get("SUDO_UID", "0"))}
    for above in root.absolute().parents:
        status = above.stat()
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if shared or status.st_uid not in trusted:
            raise UsageError(
                f"--dir {root}: others may rename what lies in {above}; choose another place"
            )


def check_entry(path: Path, reading: bool = False) -> None:
    """Raise UsageError for a link, and for what others own or may write to."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"--dir: {path} is a link; remove it, or choose another folder")
    if status.st_uid not in ({0, os.geteuid()} if reading else {os.geteuid()}):
        raise UsageError(
            f"--dir: {path} belongs to user id {status.st_uid}; choose another, or run it as them"
        )
    if status.st_mode & 0o022:
        raise UsageError(f"--dir: others may write to {path}; say chmod go-w {path}")
