"""Assigns concurrent runs of a drill to nodes, so that no fault hits another fault's run."""

from jobkit.drill.fault import FaultCase
from jobkit.drill.faults import NODE_FAULTS, WIDE
from jobkit.drill.place import Place
from jobkit.drill.slurm import SlurmPlace
from jobkit.launch.slurm.options import Options


def lane_options(place: Place, fault: FaultCase) -> Options:
    """Return sbatch options that keep the run off the nodes of other faults' runs.

    If there are enough nodes, each node fault has three; else they take turns on the last nodes.
    """
    if not isinstance(place, SlurmPlace) or place.cluster is None:
        return {}
    if "nodelist" in fault.options:
        return {"nodelist": str(fault.options["nodelist"])}
    names = place.cluster.nodes
    if fault.lane != "nodes":
        own = names[:2]
    elif len(names) >= WIDE:
        begin = 2 + 3 * NODE_FAULTS.index(fault.name)
        own = names[begin : begin + 3]
    else:
        own = names[2:] if fault.one_node or fault.needs == "urgent" else names[1:]
    away = [name for name in names if name not in own]
    return {"exclude": ",".join(away)} if away else {}
