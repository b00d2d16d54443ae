"""What this machine can do: packages that are missing, free ports, Slurm's commands."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from jobkit.errors import NotStarted, UsageError
from minicluster.config import Cluster, tag
from minicluster.processes import MARK

DIR_VARIABLE = "JOBKIT_MINICLUSTER_DIR"
# Debian's packages and the commands that we need of each. The -core package has MariaDB's program
# without its service, so that nothing is started when it is installed.
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo", "scontrol", "sbatch", "srun"),
    "munge": ("munged",),
    "slurmdbd": ("slurmdbd", "sacctmgr"),
    "mariadb-server-core": ("mariadbd",),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter"),
}
# Below Linux's usual ephemeral range, and below 20000, where training jobs take their ports.
FIRST_PORT, BLOCKS, PORTS_PER_BLOCK = 7000, 32, 400


def search_path() -> str:
    """PATH, and where Debian keeps daemons, which an ordinary user's PATH lacks."""
    parts = [*os.environ.get("PATH", "").split(":"), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    return ":".join(dict.fromkeys(part for part in parts if part))


def command(name: str) -> str:
    """The full path of a command."""
    path = shutil.which(name, path=search_path())
    if path is None:
        raise UsageError(f"{name}: no such command; {install_line([*PACKAGES])}")
    return path


def missing(packages: list[str]) -> list[str]:
    """Those of the packages of which a command is absent."""
    path = search_path()
    return [
        package
        for package in packages
        if any(shutil.which(name, path=path) is None for name in PACKAGES[package])
    ]


def install_line(packages: list[str]) -> str:
    """The one command that installs the packages, on Debian and Ubuntu."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends {' '.join(packages)}"
    return f"{sudo}apt-get update && {install}"


def check(cluster: Cluster) -> None:
    """Raise UsageError where a package is missing, or an option cannot be had at all."""
    needed = {"slurmdbd": cluster.accounting, "mariadb-server-core": cluster.accounting}
    needed["iproute2"] = cluster.netns
    if absent := missing([name for name in PACKAGES if needed.get(name, True)]):
        raise UsageError(
            f"packages are missing; install them (Debian, Ubuntu): {install_line(absent)}"
        )
    if cluster.netns and cluster.nodes > 253:  # addresses of a /24, less the bridge's
        raise UsageError(f"--nodes {cluster.nodes}: at most 253 with --netns")
    if cluster.netns and not may_unshare("--net", "--uts"):
        raise UsageError(
            "--netns: this user may not make network namespaces on this machine: run it with sudo "
            "(in a container: with CAP_SYS_ADMIN and CAP_NET_ADMIN), or leave --netns out"
        )


def may_unshare(*kinds: str) -> bool:
    """Whether mount namespaces, and others of these kinds, can be made."""
    argv = [command("unshare"), "--mount", *kinds, "--propagation", "slave", "true"]
    return os.geteuid() == 0 and not subprocess.run(argv, capture_output=True).returncode


def free_ports(cluster: Cluster) -> socket.socket:
    """Choose a block of free ports for a cluster.

    While the socket that is returned is open no other `up` takes them, before a daemon listens.
    """
    for step in range(BLOCKS):  # clusters in different folders begin at different places
        block = (int(tag(cluster.root), 16) + step) % BLOCKS
        cluster.base_port = FIRST_PORT + block * PORTS_PER_BLOCK
        lock = socket.socket()
        try:
            lock.bind(("127.0.0.1", cluster.base_port + 9))  # which no daemon uses
            lock.listen()
            for port in cluster.ports():
                with socket.socket() as probe:
                    # As the daemons do: a connection that has just ended is no obstacle.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
                    probe.listen()
        except OSError:
            lock.close()
        else:
            return lock
    last = FIRST_PORT + BLOCKS * PORTS_PER_BLOCK - 1
    raise NotStarted(f"no free block of {PORTS_PER_BLOCK} ports from {FIRST_PORT} to {last}")


def environment(root: Path) -> dict[str, str]:
    """Ours, without another cluster's settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SACCT"))
    }
    return kept | exports(root) | {"PATH": search_path()}


def exports(root: Path) -> dict[str, str]:
    """What `env` prints: it points Slurm's commands, and ours, at this cluster."""
    return {"SLURM_CONF": f"{root}/slurm.conf", DIR_VARIABLE: str(root)}


def ask(root: Path, *argv: str, timeout_s: float = 10.0) -> str | None:
    """The output of a command of Slurm; None when it failed or gave no answer in time.

    It carries the daemons' mark: an `up` that is killed leaves none behind that asks on.
    """
    try:
        done = subprocess.run(
            [command(argv[0]), *argv[1:]],
            env=environment(root) | {MARK: f"{root}:"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def node_states(root: Path) -> dict[str, str]:
    """Each node's state as sinfo says it (idle, mixed, down*, ...); empty without an answer."""
    shown = ask(root, "sinfo", "--noheader", "--Node", "--format=%N %T") or ""
    return dict(line.split() for line in shown.splitlines())
