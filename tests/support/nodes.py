"""Ends a node of a minicluster, as a power loss does, or its slurmd alone; and starts it again."""

from pathlib import Path

from minicluster.config import Cluster
from minicluster.daemons import Starter
from minicluster.machine import node_states
from minicluster.processes import end
from support.place import until


def kill(root: Path, node: str, jobs: bool) -> int:
    """SIGKILL the node's slurmd, and what runs on it too (jobs); return how many processes."""
    return end(root, 0.0, lambda m: m.node == node and (jobs or m.name == f"slurmd.{node}"))


def start(root: Path, node: str) -> None:
    """Start the node's slurmd, as `up` did, and wait until Slurm has the node."""
    cluster = Cluster.load(root)
    assert cluster
    Starter(cluster).start_slurmds([node])

    def serves() -> bool:
        shown = node_states(root).get(node, "down")
        return not shown.startswith(("down", "drain")) and "*" not in shown  # *: no answer

    until(serves, f"{node} is back")
