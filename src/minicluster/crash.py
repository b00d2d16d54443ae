"""The commands `kill` and `start`: kill and restart daemons."""

from __future__ import annotations

import signal
from collections.abc import Callable

from minicluster import cluster, machine
from minicluster.config import Plan
from minicluster.daemons import SLURMCTLD, Starter, slurmd_of
from minicluster.errors import ClusterError, UsageError
from minicluster.layout import Layout, Ports
from minicluster.processes import find_on_node, send, wait_until
from minicluster.state import State

_GONE_S = 10.0


def kill(layout: Layout, name: str, jobs: bool) -> str:
    """SIGKILL a node's slurmd, or slurmctld; return what was done, in one line.

    jobs: all processes on the node too, as after a power loss. Raises UsageError for an unknown
    name, ClusterError if the daemon does not run.
    """
    with cluster.locked(layout):
        current = cluster.running(layout)
        if jobs and name == SLURMCTLD:
            raise UsageError("kill --jobs is for nodes: no job runs on slurmctld")
        process = current.process(_daemon(current, name))
        if process is None or not current.alive(process):
            raise ClusterError(f"{name} is not running; start it: hpc/minicluster start {name}")
        with_it = find_on_node(layout, name) if jobs else []
        doomed = [process, *(other for other in with_it if other.pid != process.pid)]
        for one in doomed:
            send(one, signal.SIGKILL)
        if not wait_until(lambda: not any(one.alive() for one in doomed), _GONE_S):
            raise ClusterError(f"{name} did not end after SIGKILL")
        others = f" and {len(doomed) - 1} processes on it" if jobs else ""
        return f"killed: {process.name}{others}"


def start(layout: Layout, name: str, say: Callable[[str], None]) -> str:
    """Start a daemon that was killed as `up` did, and wait until it serves; return what was done.

    Raises UsageError for a name that is none.
    """
    with cluster.locked(layout):
        current = cluster.running(layout)
        process = current.process(_daemon(current, name))
        if process is not None and current.alive(process):
            return f"{name} is already running"
        Starter(plan_of(layout, current), current, say).restart(name)
        return f"started: {_daemon(current, name)}"


def plan_of(layout: Layout, current: State) -> Plan:
    """The plan of a cluster that is up, from its state; without the database's password."""
    return Plan(
        options=current.options,
        layout=layout,
        ports=Ports(current.base_port),
        host=machine.short_host(),
        user=current.user,
        subnet=current.subnet,
        names_resolve=current.names_resolve,
    )


def _daemon(current: State, name: str) -> str:
    """The daemon's name in the state; UsageError for what is neither a node nor slurmctld."""
    if name == SLURMCTLD:
        return name
    names = current.options.node_names
    if name not in names:
        raise UsageError(f"{name}: must be slurmctld or a node, {names[0]} to {names[-1]}")
    return slurmd_of(name)
