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

from minicluster import state
from minicluster.layout import ClusterError, Layout, UsageError
from minicluster.locks import locked
from minicluster.machine import ask, command, node_states
from minicluster.state import Fault, State

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


def parse(action: str, words: list[str], nodes: list[str]) -> Fault:
    """The fault that `link cut` or `link slow` asks for; UsageError where it makes no sense."""
    if action == "slow":
        if len(words) != 2:
            raise UsageError("link slow takes a node and a rate: link slow n2 10mbit")
        return Fault(_known(words[:1], nodes), check_rate(words[1]))
    if len(words) not in (1, 2) or len(set(words)) != len(words):
        raise UsageError("link cut takes one node, or two to separate: link cut n2, link cut n1 n2")
    return Fault(_known(words, nodes))


def _known(words: list[str], nodes: list[str]) -> list[str]:
    for word in words:
        if word not in nodes:
            raise UsageError(f"{word}: no such node; there are {nodes[0]} to {nodes[-1]}")
    return words


def change(layout: Layout, action: str, words: list[str]) -> list[str]:
    """Make or end faults; returns what was done, in plain lines."""
    with locked(layout):
        current = state.running(layout)
        if current.subnet is None:
            raise UsageError("link: the nodes have no separate links; use `up --netns`")
        network, pids = Network(layout, current.subnet), _holder_pids(current)
        nodes, faults = current.options.node_names, current.faults
        if action == "heal":
            healed = [f for f in faults if not _known(words, nodes) or set(words) & set(f.nodes)]
        else:
            fault = parse(action, words, nodes)
            healed = [old for old in faults if old.nodes == fault.nodes]
        for old in healed:
            undo(network, old, pids)
            faults.remove(old)
            state.save(layout, current)
        if action == "heal":
            lines = [f"link: healed: {old}" for old in healed]
            return lines + _resume(layout, current) if lines else ["link: nothing to heal"]
        # First written down: half a fault can then be healed as well.
        faults.append(fault)
        state.save(layout, current)
        apply(network, fault, pids)
        return [f"link: {fault}"]


def _resume(layout: Layout, current: State) -> list[str]:
    """A node that was cut for long stays down until someone says that it is back."""
    cut = {name for fault in current.faults for name in fault.nodes}
    states = node_states(layout).items()
    down = [name for name, shown in states if "down" in shown and name not in cut]
    for name in down:
        ask(layout, "scontrol", "update", f"nodename={name}", "state=resume")
    return [f"link: {', '.join(down)} resumed in Slurm"] if down else []


def _holder_pids(current: State) -> dict[str, int]:
    """The process that holds each node's namespaces."""
    holders = {name: current.process(f"net-{name}") for name in current.options.node_names}
    gone = [name for name, process in holders.items() if not (process and process.alive())]
    if gone:
        raise ClusterError(f"{', '.join(gone)}: its namespace is gone; run `down`, then `up`")
    return {name: process.pid for name, process in holders.items() if process}
