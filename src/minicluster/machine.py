"""What this machine, and this user on it, can do; packages that are missing; Slurm's commands."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from dataclasses import dataclass, field

from minicluster.config import Options
from minicluster.layout import DIR_VARIABLE, ClusterError, Layout, UsageError
from minicluster.processes import MARK

# Debian's packages and the commands that we need of each. The -core package has MariaDB's program
# without its service, so that nothing is started when it is installed.
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo", "scontrol", "sbatch", "srun"),
    "munge": ("munged",),
    "slurmdbd": ("slurmdbd", "sacctmgr"),
    "mariadb-server-core": ("mariadbd",),
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter"),
}
_ACCOUNTING = ("slurmdbd", "mariadb-server-core")
_NETNS = ("iproute2",)


def search_path() -> str:
    """PATH, and where Debian keeps daemons, which an ordinary user's PATH lacks."""
    parts = [*os.environ.get("PATH", "").split(":"), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    return ":".join(dict.fromkeys(part for part in parts if part))


def command(name: str) -> str:
    """The full path of a command."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise UsageError(f"{name}: no such command; {install_line(list(PACKAGES))}")
    return found


def packages(options: Options) -> list[str]:
    """The packages that a cluster with these options needs."""
    left_out = set() if options.accounting else set(_ACCOUNTING)
    if not options.netns:
        left_out |= set(_NETNS)
    return [package for package in PACKAGES if package not in left_out]


def missing(wanted: list[str]) -> list[str]:
    """Those of the packages of which a command is absent."""
    path = search_path()
    return [
        package
        for package in wanted
        if any(shutil.which(name, path=path) is None for name in PACKAGES[package])
    ]


def install_line(names: list[str]) -> str:
    """The one command that installs the packages, on Debian and Ubuntu."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}apt-get update && {sudo}apt-get install -y --no-install-recommends " + " ".join(
        names
    )


def check_packages(options: Options) -> None:
    absent = missing(packages(options))
    if absent:
        raise UsageError(
            f"packages are missing: {', '.join(absent)}. Install them (Debian, Ubuntu):\n"
            f"  {install_line(absent)}"
        )


@dataclass(frozen=True)
class Survey:
    """What was found; `notes` says in plain lines what cannot be had here."""

    host: str
    user: str
    mounts: bool  # a mount namespace can be made: node names resolve in jobs
    notes: list[str] = field(default_factory=list)


def survey(options: Options) -> Survey:
    """Look, start nothing; UsageError where an option cannot be had at all."""
    check_packages(options)
    root = os.geteuid() == 0
    if options.netns:
        _check_netns(root)
    mounts = root and _works(["unshare", "--mount", "--propagation", "slave", "true"])
    notes = []
    if not root:
        notes.append("only your own jobs run: slurmd needs root to start another user's")
    if not mounts:
        notes.append(
            f"node names (n1, ...) do not resolve inside jobs: that needs {_root_or_mount(root)}; "
            "take the address that `sinfo -h -n n1 -o %o` prints"
        )
    if options.memory_limits:
        notes.append(
            "Slurm itself watches the jobs' memory once a second and kills: a job that is over it "
            "ends FAILED, not OUT_OF_MEMORY as by a kernel's limit"
        )
    return Survey(short_host(), user_name(), mounts, notes)


def _root_or_mount(root: bool) -> str:
    return "the right to mount (CAP_SYS_ADMIN)" if root else "root"


def _check_netns(root: bool) -> None:
    if not root:
        raise UsageError("--netns: network namespaces need root; run it with sudo, or leave it out")
    probe = ["unshare", "--net", "--uts", "--mount", "--propagation", "slave", "true"]
    if not _works(probe):
        raise UsageError(
            "--netns: this machine does not let root make network namespaces (a container "
            "without CAP_SYS_ADMIN and CAP_NET_ADMIN?); leave --netns out"
        )


def _works(argv: list[str]) -> bool:
    argv = [command(argv[0]), *argv[1:]]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def short_host() -> str:
    return socket.gethostname().split(".")[0]


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ClusterError(
            f"user id {os.geteuid()} has no name in /etc/passwd; Slurm needs one"
        ) from None


def environment(layout: Layout) -> dict[str, str]:
    """Ours, without another cluster's settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SACCT"))
    }
    return kept | exports(layout) | {"PATH": search_path()}


def exports(layout: Layout) -> dict[str, str]:
    """What `env` prints: it points Slurm's commands, and ours, at this cluster."""
    return {"SLURM_CONF": str(layout.slurm_conf), DIR_VARIABLE: str(layout.root)}


def ask(layout: Layout, *argv: str, timeout_s: float = 10.0) -> str | None:
    """The command's output; None when it failed or gave no answer in time.

    It carries the daemons' mark: an `up` that is killed leaves none behind that asks on.
    """
    try:
        done = subprocess.run(
            [command(argv[0]), *argv[1:]],
            env=environment(layout) | {MARK: str(layout.root)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def node_states(layout: Layout) -> dict[str, str]:
    """Each node's state as sinfo says it (idle, mixed, down*, ...); empty without an answer."""
    shown = ask(layout, "sinfo", "--noheader", "--Node", "--format=%N %T") or ""
    return dict(line.split() for line in shown.splitlines())
