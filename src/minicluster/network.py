"""Each node in a network namespace, on one bridge; links that can be cut, slowed and healed.

A namespace lives as long as a process in it (its holder, see daemons.py): nothing is mounted
under /run/netns, and nothing stays when the processes are gone, save the bridge. `ip netns
exec` is not used: it mounts /sys again, without the cgroups of the machine.
"""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from minicluster.errors import ClusterError, UsageError
from minicluster.layout import Layout
from minicluster.machine import command
from minicluster.state import Fault

# No host has it: what is sent to it is lost without a word, as on a cut cable.
_NOBODY = "02:00:00:00:00:00"


@dataclass(frozen=True)
class Network:
    """Names and addresses of a cluster's network; names hold at most 15 characters."""

    layout: Layout
    subnet: str

    @property
    def bridge(self) -> str:
        return f"mc{self.layout.tag}b"

    def link(self, index: int) -> str:
        """The machine's end of the cable to node number `index`; the node's end is eth0."""
        return f"mc{self.layout.tag}v{index}"

    def address(self, index: int) -> str:
        return f"{self.subnet}.{index}"


def choose_subnet(layout: Layout) -> str:
    """The first three numbers of a /24 that no interface of this machine has."""
    shown = _run([command("ip"), "-json", "-4", "addr", "show"])
    taken = [
        ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
        for interface in json.loads(shown or "[]")
        for address in interface.get("addr_info", [])
        if "local" in address
    ]
    third = int(layout.tag, 16) % 256
    for second in range(77, 128):
        subnet = f"10.{second}.{third}"
        if not any(ipaddress.ip_network(f"{subnet}.0/24").overlaps(other) for other in taken):
            return subnet
    raise ClusterError("--netns: no free network 10.77.x to 10.127.x; is one of them in use?")


def bridge_commands(network: Network, holders: dict[int, int]) -> list[str]:
    """`ip` commands for the machine's side; holders: the pid in each node's namespace."""
    lines = [
        f"link add name {network.bridge} type bridge",
        f"addr add {network.subnet}.254/24 dev {network.bridge}",
        f"link set {network.bridge} up",
    ]
    for index, pid in holders.items():
        link = network.link(index)
        lines += [
            f"link add {link} type veth peer name eth0 netns {pid}",
            f"link set {link} master {network.bridge}",
            f"link set {link} up",
        ]
    return lines


def node_commands(network: Network, index: int) -> list[str]:
    """`ip` commands inside a node's namespace."""
    return [
        "link set lo up",
        f"addr add {network.address(index)}/24 dev eth0",
        "link set eth0 up",
    ]


def create(network: Network, holders: dict[int, int]) -> None:
    _ip(bridge_commands(network, holders))
    for index, pid in holders.items():
        _ip(node_commands(network, index), pid)


def remove(layout: Layout) -> None:
    """Delete whatever is left of the cluster's network; the names follow from its folder."""
    for interface in sorted(Path("/sys/class/net").glob(f"mc{layout.tag}*")):
        # May be gone already: the kernel takes a cable away with its namespace.
        argv = [command("ip"), "link", "delete", interface.name]
        subprocess.run(argv, capture_output=True, check=False)


def check_rate(text: str) -> str:
    """A rate as `tc` takes it, such as 20mbit."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}[kmg]bit", text):
        raise UsageError(f"rate {text!r}: write a number and kbit, mbit or gbit, such as 20mbit")
    return text


def apply(network: Network, fault: Fault, pids: dict[str, int]) -> None:
    """Make the fault; pids: a process in each node's namespace."""
    if fault.rate:
        shape = f"root tbf rate {fault.rate} burst 64kb latency 400ms"
        _tc(f"qdisc replace dev {network.link(_index(fault.nodes[0]))} {shape}")
        _tc(f"qdisc replace dev eth0 {shape}", pids[fault.nodes[0]])
    elif len(fault.nodes) == 1:
        _ip([f"link set {network.link(_index(fault.nodes[0]))} down"])
    else:
        for here, there in (fault.nodes, fault.nodes[::-1]):
            # Each end forgets the other's way; both still reach the controller and all others.
            to = network.address(_index(there))
            _ip([f"neigh replace {to} lladdr {_NOBODY} dev eth0 nud permanent"], pids[here])


def undo(network: Network, fault: Fault, pids: dict[str, int]) -> None:
    """End the fault."""
    if fault.rate:
        _tc(f"qdisc delete dev {network.link(_index(fault.nodes[0]))} root")
        _tc("qdisc delete dev eth0 root", pids[fault.nodes[0]])
    elif len(fault.nodes) == 1:
        _ip([f"link set {network.link(_index(fault.nodes[0]))} up"])
    else:
        for here, there in (fault.nodes, fault.nodes[::-1]):
            _ip([f"neigh delete {network.address(_index(there))} dev eth0"], pids[here])


def _index(node: str) -> int:
    return int(node.removeprefix("n"))


def _inside(pid: int | None) -> list[str]:
    return [] if pid is None else [command("nsenter"), f"--target={pid}", "--net"]


def _ip(lines: list[str], pid: int | None = None) -> None:
    _run([*_inside(pid), command("ip"), "-batch", "-"], "\n".join(lines) + "\n")


def _tc(line: str, pid: int | None = None) -> None:
    _run([*_inside(pid), command("tc"), *line.split()])


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
