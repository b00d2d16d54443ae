"""`link cut|slow|heal`: parses the arguments, applies and removes link faults."""

from __future__ import annotations

from minicluster import cluster, network, slurm, state
from minicluster.errors import ClusterError, UsageError
from minicluster.layout import Layout
from minicluster.network import Network
from minicluster.state import Fault, State


def parse(action: str, words: list[str], nodes: list[str]) -> Fault:
    """The fault that `link cut` or `link slow` asks for; UsageError where it makes no sense."""
    if action == "slow":
        if len(words) != 2:
            raise UsageError("link slow takes a node and a rate: link slow n2 10mbit")
        return Fault(_known(words[:1], nodes), network.check_rate(words[1]))
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
    with cluster.locked(layout):
        current = cluster.running(layout)
        if current.subnet is None:
            raise UsageError("link: the nodes have no separate links; use `up --netns`")
        if action == "heal":
            return _heal(layout, current, _known(words, current.options.node_names))
        fault = parse(action, words, current.options.node_names)
        _end(layout, current, [old for old in current.faults if old.nodes == fault.nodes])
        # First written down: half a fault can then be healed as well.
        current.faults.append(fault)
        state.save(layout, current)
        network.apply(_network(layout, current), fault, _pids(current))
        return [f"link: {fault}"]


def _heal(layout: Layout, current: State, nodes: list[str]) -> list[str]:
    ended = [fault for fault in current.faults if not nodes or set(nodes) & set(fault.nodes)]
    _end(layout, current, ended)
    if not ended:
        return ["link: nothing to heal"]
    return [f"link: healed: {fault}" for fault in ended] + _resume(layout, current)


def _end(layout: Layout, current: State, faults: list[Fault]) -> None:
    for fault in faults:
        network.undo(_network(layout, current), fault, _pids(current))
        current.faults.remove(fault)
        state.save(layout, current)


def _resume(layout: Layout, current: State) -> list[str]:
    """A node that was cut for long stays down until someone says that it is back."""
    lost = [name for name, shown in slurm.node_states(layout).items() if "down" in shown]
    cut = {name for fault in current.faults for name in fault.nodes}
    lost = [name for name in lost if name not in cut]
    for name in lost:
        slurm.ask(layout, "scontrol", "update", f"nodename={name}", "state=resume")
    return [f"link: {', '.join(lost)} resumed in Slurm"] if lost else []


def _network(layout: Layout, current: State) -> Network:
    if current.subnet is None:
        raise ClusterError("the cluster has no separate network")
    return Network(layout, current.subnet)


def _pids(current: State) -> dict[str, int]:
    """The process that holds each node's namespaces."""
    found = {name: current.process(f"net-{name}") for name in current.options.node_names}
    gone = [name for name, process in found.items() if not (process and process.alive())]
    if gone:
        raise ClusterError(f"{', '.join(gone)}: its namespace is gone; run `down`, then `up`")
    return {name: process.pid for name, process in found.items() if process}
