"""The columns of results.csv about load, memory in use and energy."""

from jobkit.analysis.tables.column import NUMBER, TEXT, Column

_NODE = "of the nodes, over the run, whoever caused it"
USE = tuple(
    Column(f"{name}_{kind}{unit}", NUMBER, f"{text}, {words}")
    for name, unit, text in (
        ("cpu_busy", "", f"load of all cores {_NODE}, 0 to 1"),
        ("node_memory", "_mib", f"memory in use {_NODE}"),
        ("gpu_busy", "", "share of the time in which a kernel was running on the GPUs, 0 to 1"),
        ("gpu_memory", "_mib", "memory of the GPUs in use"),
    )
    for kind, words in (("mean", "mean over time and ranks"), ("max", "largest sample"))
)
ENERGY = (
    Column("energy_gpu_j", NUMBER, "energy of the run's GPUs in joules, training and evaluation"),
    Column("energy_node_j", NUMBER, "energy of its nodes, if the job had them alone"),
    Column("energy_source", TEXT, "counter and scope of each: empty if nothing was measured"),
    Column("joules_per_work", NUMBER, "energy per unit of work (image, token), without warm-up"),
    Column("joules_of", TEXT, "whose energy that is: node or gpu; of Slurm: whole job"),
    Column("slurm_energy_j", NUMBER, "energy of the job's nodes, other jobs' included (sacct)"),
)
