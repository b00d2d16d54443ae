"""What a cluster uses of this machine: packages, ports, Slurm's commands, a network of its own.

Where that may be had each node is in a network namespace, on one bridge. A namespace lives as long
as a process in it (its holder, see daemons.py): nothing is mounted under /run/netns, and nothing
stays when the processes are gone, save the bridge. `ip netns exec` is not used: it mounts /sys
again, without the cgroups of the machine.
"""

import ipaddress
import json
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


# --- commands -------------------------------------------------------------------------------------


def search_path() -> str:
    """PATH, and where Debian keeps daemons, which an ordinary user's PATH lacks."""
    parts = [*os.environ.get("PATH", "").split(":"), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    return ":".join(dict.fromkeys(part for part in parts if part))


def command(name: str) -> str:
    path = shutil.which(name, path=search_path())
    if path is None:
        raise UsageError(f"{name}: no such command; {install_line([*PACKAGES])}")
    return path


def install_line(packages: list[str]) -> str:
    """The one command that installs the packages, on Debian and Ubuntu."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends {' '.join(packages)}"
    return f"{sudo}apt-get update && {install}"


def check() -> None:
    """Raise UsageError where a command of the packages is missing."""
    path = search_path()
    if not all(shutil.which(name, path=path) for names in PACKAGES.values() for name in names):
        raise UsageError(f"packages are missing (Debian, Ubuntu): {install_line([*PACKAGES])}")


def may_have_network(cluster: Cluster) -> bool:
    """Whether each node can have an address and a host name of its own: root's right, mostly."""
    if os.geteuid() != 0 or cluster.nodes > 253:  # addresses of a /24, less the bridge's
        return False
    made = "{0} link add mc0 type bridge && {0} link add mc1 type veth".format(command("ip"))
    words = [command("unshare"), "--mount", "--net", "--uts", "sh", "-c", made]
    return not subprocess.run(words, capture_output=True).returncode


def environment(root: Path) -> dict[str, str]:
    """Ours, without another cluster's settings."""
    others = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SACCT")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    return kept | exports(root) | {"PATH": search_path()}


def exports(root: Path) -> dict[str, str]:
    """What `env` prints: it points Slurm's commands, and ours, at this cluster."""
    return {"SLURM_CONF": f"{root}/slurm.conf", DIR_VARIABLE: str(root)}


def ask(root: Path, *argv: str, timeout_s: float = 10.0) -> str | None:
    """The output of a command of Slurm; None when it failed or gave no answer in time.

    It carries the daemons' mark: an `up` that is killed leaves none behind that asks on.
    """
    words, env = [command(argv[0]), *argv[1:]], environment(root) | {MARK: f"{root}:"}
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def node_states(root: Path) -> dict[str, str]:
    """Each node's state as sinfo says it (idle, mixed, down*, ...); empty without an answer."""
    shown = ask(root, "sinfo", "--noheader", "--Node", "--format=%N %T") or ""
    return dict(line.split() for line in shown.splitlines())


# --- ports and network ----------------------------------------------------------------------------


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
                # As the daemons do: a connection that has just ended is no obstacle.
                socket.create_server(("", port)).close()
        except OSError:
            lock.close()
        else:
            return lock
    last = FIRST_PORT + BLOCKS * PORTS_PER_BLOCK - 1
    raise NotStarted(f"no free block of {PORTS_PER_BLOCK} ports from {FIRST_PORT} to {last}")


def choose_subnet(root: Path) -> str:
    """The first three numbers of a /24 that no interface of this machine has; or empty."""
    taken = [
        ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
        for interface in json.loads(ip("-json", "-4", "addr", "show") or "[]")
        for address in interface.get("addr_info", [])
        if "local" in address
    ]
    for second in range(77, 128):
        subnet = f"10.{second}.{int(tag(root), 16) % 256}"
        if not any(ipaddress.ip_network(f"{subnet}.0/24").overlaps(other) for other in taken):
            return subnet
    return ""


def link_of(root: Path, node: str) -> str:
    """The machine's end of the cable to a node, whose own end is eth0; at most 15 characters."""
    return f"mc{tag(root)}v{node[1:]}"


def create_network(cluster: Cluster, holders: dict[str, int]) -> None:
    """Make the bridge and the cables; holders: a process in each node's namespace."""
    bridge = f"mc{tag(cluster.root)}b"
    lines = [
        f"link add name {bridge} type bridge",
        f"addr add {cluster.control_address}/24 dev {bridge}",
        f"link set {bridge} up",
    ]
    for node, pid in holders.items():
        link = link_of(cluster.root, node)
        lines += [
            f"link add {link} type veth peer name eth0 netns {pid}",
            f"link set {link} master {bridge}",
            f"link set {link} up",
        ]
    ip("-batch", "-", text="\n".join(lines))
    for node, pid in holders.items():
        address = cluster.node_address(int(node[1:]))
        lines = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
        inside = [command("nsenter"), f"--target={pid}", "--net"]
        ip("-batch", "-", text="\n".join(lines), inside=inside)


def remove_network(root: Path) -> None:
    """Delete whatever is left of the cluster's network; the names follow from its folder."""
    for interface in Path("/sys/class/net").glob(f"mc{tag(root)}*"):
        # May be gone already: the kernel takes a cable away with its namespace.
        subprocess.run([command("ip"), "link", "delete", interface.name], capture_output=True)


def ip(*words: str, text: str = "", inside: list[str] | None = None) -> str:
    """Run `ip`; return what it says. Raises NotStarted where it fails."""
    argv = [*(inside or []), command("ip"), *words]
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode:
        raise NotStarted(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
