"""The checks of a preflight on the facts of all ranks: pure functions, one per check.

Each returns what was measured, and what is wrong with its fix.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from jobkit.checks.preflight.finding import (
    CheckResult,
    Facts,
    by_host,
    grouped,
    many,
    named_ranks,
    ranges,
    where,
)

_HUNG_NODE = (
    "a file system, a name server or a GPU's driver hangs there: check dmesg and df on that node, "
    "or leave it out with --exclude"
)
_START_WITH_SRUN = (
    "start ranks with srun as run.sh does, and export no RANK, WORLD_SIZE or SLURM_* variable in "
    "the batch script: there they have one value for all ranks"
)
_BLOCK = "srun --distribution=block, with the same number of ranks on each node"
_WORLD_SIZE = (
    "unset WORLD_SIZE, and do not set SLURM_NTASKS by hand; sizes come from --nodes and "
    "--ntasks-per-node"
)
_GPU_PER_RANK = (
    "ask for one GPU per rank (--gpus-per-node as --ntasks-per-node), or say --device cpu"
)
_BIND_CORES = (
    "srun --cpu-bind=cores and --cpus-per-task (sbatch and srun both), and no taskset or "
    "KMP_AFFINITY around Python"
)
_MASTER_NAME = (
    "take the name from the 127.x line of /etc/hosts there, or set MASTER_ADDR to the address of "
    "the fast interface (a site profile's interface suffix does that)"
)
_OWN_NAME = (
    "take the name from the 127.x line of /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface "
    "that the nodes share"
)
_SAME_CODE = (
    "use one environment and one checkout on all nodes: a shared file system or one container "
    "image; check PYTHONPATH"
)
SHARED_FOLDER = "choose a folder on a file system of all nodes with --run-dir (or JOBKIT_LOGS)"


def one_machine(facts: Sequence[Facts]) -> bool:
    """Return whether all share a kernel and a network, even under several nodes' names."""
    return len({f["machine"] for f in facts}) == 1


def presence(
    facts: Sequence[Facts], expected: int, waited_s: float, connected: Sequence[Facts]
) -> CheckResult:
    """Check that every process that was started has connected, and reported its facts."""
    found = CheckResult("presence", f"{many(expected, 'rank')} connected within {waited_s:.1f} s")
    chief = facts[0]
    if len(facts) >= expected:
        return found
    reported = {f["rank"] for f in facts}
    stuck = [f for f in connected if f["rank"] not in reported]
    if stuck:
        text = f"connected but did not report within {waited_s:.0f} s"
        found.fault(where(stuck), text, _HUNG_NODE)
    absent = sorted(set(range(expected)) - reported - {f["rank"] for f in stuck})
    nodes, per_node = chief["nodes"], max(chief["local_world_size"], 1)
    homes: dict[str, list[int]] = defaultdict(list)
    for rank in absent:
        at = rank // per_node
        homes[nodes[at] if at < len(nodes) else "an unknown node"].append(rank)
    for name, ranks in homes.items():
        found.fault(
            f"{named_ranks(ranks)} on {name}",
            f"did not connect within {waited_s:.0f} s",
            f"check {name} and the error lines of these ranks (did they start? can they reach "
            f"{chief['master_addr']}?), or leave the node out with --exclude={name}",
        )
    return found


def places(facts: Sequence[Facts]) -> CheckResult:
    """Check that each rank is there once, and that ranks of a node follow each other."""
    hosts = by_host(facts)
    spread = ", ".join(
        f"{h} {ranges(f['rank'] for f in own)}" for h, own in list(hosts.items())[:8]
    )
    found = CheckResult("ranks", f"each rank once; {spread}" + ", ..." * (len(hosts) > 8))
    for text, own in grouped(facts, lambda f: f["place_fault"]).items():
        found.fault(where(own), text, _START_WITH_SRUN)
    for rank, count in sorted(Counter(f["rank"] for f in facts).items()):
        if count > 1:
            same = [f for f in facts if f["rank"] == rank]
            nodes = ", ".join(f"{h} ({len(o)})" for h, o in list(by_host(same).items())[:8])
            found.fault(
                nodes, f"{count} processes believe that they are rank {rank}", _START_WITH_SRUN
            )
    for one in () if found.faults else facts:
        size = one["local_world_size"]
        if one["rank"] % size != one["local_rank"] or any(
            f["rank"] // size != one["rank"] // size for f in hosts[one["host"]]
        ):
            text = f"rank is not node * {size} + local_rank (local_rank {one['local_rank']})"
            found.fault(where([one]), text, _BLOCK)
    return found


def world(facts: Sequence[Facts]) -> CheckResult:
    """Check that all ranks have the same world size, and that it is the number of tasks."""
    size = facts[0]["world_size"]
    found = CheckResult("world", f"world size {size} on {many(len(by_host(facts)), 'node')}")
    if facts[0]["tasks"]:
        found.text += f", as the step's {facts[0]['tasks']} tasks"
    wrong = [f for f in facts if f["tasks"] not in (None, f["world_size"]) and not f["place_fault"]]
    for (said, tasks), own in grouped(wrong, lambda f: (f["world_size"], f["tasks"])).items():
        found.fault(where(own), f"world size is {said} and the step has {tasks} tasks", _WORLD_SIZE)
    sizes = grouped(facts, lambda f: f["world_size"])
    if len(sizes) > 1 and not wrong and not any(f["place_fault"] for f in facts):
        text = ", ".join(f"{s} ({where(own)})" for s, own in sizes.items())
        found.fault("all", f"ranks differ in the world size: {text}", _WORLD_SIZE)
    return found


def gpus(facts: Sequence[Facts]) -> CheckResult:
    """Check that each rank of a node has a GPU to itself, by UUID; or that none has one."""
    found = CheckResult("gpus", "none visible: the ranks compute on their CPUs")
    for text, own in grouped(facts, lambda f: f.get("gpu_fault")).items():
        found.fault(where(own), text, _GPU_PER_RANK)
    with_gpu = [f for f in facts if f["gpus"]]
    if 0 < len(with_gpu) < len(facts) and not found.faults:
        without = [f for f in facts if not f["gpus"]]
        found.fault(where(without), "no GPU is visible, and other ranks have one", _GPU_PER_RANK)
    for (host, uuid), own in grouped(
        [f for f in with_gpu if f.get("gpu")], lambda f: (f["host"], f["gpu"])
    ).items():
        if len(own) > 1:
            text = f"{len(own)} ranks are on one GPU, {uuid} (host {host})"
            found.fault(where(own), text, _GPU_PER_RANK)
    if with_gpu:
        kinds = Counter(f.get("gpu_name", "unknown") for f in with_gpu)
        found.text = f"one per rank, none shared: {', '.join(sorted(kinds))}"
        if len(kinds) > 1:
            found.notes.append(f"gpus: mixed GPU models, the slowest limits all: {dict(kinds)}")
    return found


def cores(facts: Sequence[Facts]) -> CheckResult:
    """Check that no rank is bound to another's cores, nor to fewer than it has threads."""
    found = CheckResult("cores")
    texts = []
    for host, own in by_host(facts).items():
        sets = {frozenset(f["cores"]) for f in own}
        total, least = frozenset.union(*sets), min(map(len, sets))
        bound = len(total) < own[0]["machine_cores"]
        if len(own) > 1 and len(sets) == 1 and least < len(own) and bound:
            text = f"all share {many(least, 'core')} ({ranges(total)}) of "
            found.fault(where(own), text + str(own[0]["machine_cores"]), _BIND_CORES)
        elif len(sets) > 1 and sum(map(len, sets)) > len(total):
            pairs = ", ".join(f"rank {f['rank']}: {ranges(f['cores'])}" for f in own[:4])
            found.fault(where(own), f"bound to cores that overlap ({pairs})", _BIND_CORES)
        found.notes += _crowded(host, own, len(total))
        shared = f", shared by {len(own)} ranks" if len(sets) < len(own) else " per rank"
        texts.append(f"{host} {least} of {own[0]['machine_cores']} cores{shared}")
    found.text = "; ".join(texts[:4]) + "; ..." * (len(texts) > 4)
    few = [f for f in facts if len(f["cores"]) < f["threads"]]
    for (threads, count), own in grouped(few, lambda f: (f["threads"], len(f["cores"]))).items():
        text = f"{threads} threads on {many(count, 'core')}"
        found.fault(where(own), text, f"OMP_NUM_THREADS={count}, or more --cpus-per-task")
    return found


def _crowded(host: str, own: Sequence[Facts], cores: int) -> list[str]:
    threads = sum(f["threads"] for f in own)
    if threads <= cores:
        return []
    of = f"{threads} threads of {len(own)} ranks"
    return [f"cores: {host} has {cores} for {of}: cores oversubscribed"]


def loopback(addresses: Iterable[str]) -> list[str]:
    """Return those of the addresses at which a machine reaches only itself."""
    return [a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback]


def names(facts: Sequence[Facts]) -> CheckResult:
    """Check that the master's name, and each node's own, resolve to what others can reach."""
    chief = facts[0]
    addr, port = chief["master_addr"], chief["master_port"]
    ips = ", ".join(chief["master_ips"][:2])
    at = f"{addr}{f':{port}' * bool(port)}"
    found = CheckResult(
        "master", f"{at} is {ips}, reached from {many(len(by_host(facts)), 'node')}"
    )
    nodes = max(len(by_host(facts)), len(chief["nodes"]))
    # Nodes that are simulated on one machine do reach each other at its loopback.
    if nodes == 1 or (one_machine(facts) and len(by_host(facts)) == nodes):
        return found
    for ip, own in grouped(facts, lambda f: next(iter(loopback(f["master_ips"])), "")).items():
        found.fault(
            where(own), f"the master's name {addr} resolves to {ip} between nodes", _MASTER_NAME
        )
    for one in facts if not found.faults else ():
        own_loop = loopback(one["own_ips"])
        if not one["interface"] and (own_loop or not one["own_ips"]):
            text = f"resolves to {own_loop[0]}" if own_loop else "does not resolve"
            text = f"its own name {one['hostname']} {text}: Gloo would offer that to other nodes"
            found.fault(where([one]), text, _OWN_NAME)
    return found


def versions(facts: Sequence[Facts]) -> CheckResult:
    """Check that Python, torch and jobkit are the same on all ranks."""
    commit = next((f["commit"] for f in facts if f.get("commit")), "none")
    text = ", ".join(f"{name} {value}" for name, value in facts[0]["versions"].items())
    found = CheckResult("versions", f"{text}, commit {commit[:12]}")
    for name in sorted({name for f in facts for name in f["versions"]}):
        values = grouped(facts, lambda f, name=name: f["versions"].get(name, "none"))  # type: ignore[misc]
        if len(values) > 1:
            usual = max(values, key=lambda value: len(values[value]))
            for value, own in values.items():
                if value != usual:
                    text = f"{name} is {value}, and {usual} on the other ranks"
                    found.fault(where(own), text, _SAME_CODE)
    return found


def writable(facts: Sequence[Facts]) -> CheckResult:
    """Check that each node can write to the run's folder."""
    found = CheckResult(
        "logs", f"{facts[0]['log_dir']} is writable from {many(len(by_host(facts)), 'node')}"
    )
    for text, own in grouped(facts, lambda f: f["log_fault"]).items():
        text = f"{own[0]['log_dir']} cannot be written: {text}"
        found.fault(where(own), text, SHARED_FOLDER)
    return found
