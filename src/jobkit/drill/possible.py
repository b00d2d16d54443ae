"""Whether a fault can be injected at a place."""

import os

from jobkit.drill.fault import FaultCase
from jobkit.drill.place import Place
from jobkit.drill.slurm import SlurmPlace


def impossible(place: Place, fault: FaultCase) -> str:
    """Return why a fault cannot be injected at a place; empty if it can."""
    if place.name not in fault.where:
        return "it needs Slurm"
    slurm = place if isinstance(place, SlurmPlace) else None
    cluster = slurm.cluster if slurm else None
    if fault.needs == "urgent" and not (slurm and slurm.urgent):
        return "no partition whose jobs preempt others: name one with --urgent-partition"
    if fault.needs == "processes" and not place.sees_processes:
        return "it signals one rank on its node: needs --local or --minicluster"
    if fault.needs in ("minicluster", "links") and cluster is None:
        return "it kills daemons of the cluster: needs --minicluster"
    if fault.needs == "links" and cluster and not cluster.links:
        return "the nodes have no separate network links: needs minicluster up --netns, as root"
    if fault.needs == "root" and (os.geteuid() != 0 or place.namespace() is None):
        return "only root can mount a small file system, on this machine or on root's minicluster"
    return ""
