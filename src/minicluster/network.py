"""Each node in a network namespace, on one bridge; links that can be cut and healed.

A namespace lives as long as a process in it (its holder, see daemons.py): nothing is mounted
under /run/netns, and nothing stays when the processes are gone, save the bridge. `ip netns
exec` is not used: it mounts /sys again, without the cgroups of the machine.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

from jobkit.errors import NotStarted
from minicluster.config import Cluster, tag
from minicluster.machine import command


def choose_subnet(root: Path) -> str:
    """The first three numbers of a /24 that no interface of this machine has."""
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
    raise NotStarted("--netns: no free network 10.77.x to 10.127.x; is one of them in use?")


def link_of(root: Path, node: str) -> str:
    """The machine's end of the cable to a node, whose own end is eth0; at most 15 characters."""
    return f"mc{tag(root)}v{node[1:]}"


def create(cluster: Cluster, holders: dict[str, int]) -> None:
    """Make the bridge and the cables; holders: a process in each node's namespace."""
    bridge = f"mc{tag(cluster.root)}b"
    lines = [
        f"link add name {bridge} type bridge",
        f"addr add {cluster.subnet}.254/24 dev {bridge}",
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


def remove(root: Path) -> None:
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
