"""The judgement of a preflight: the facts of all ranks in, what is wrong and its fix out.

Pure functions, one a check. Each returns a Finding: what was measured, where nothing is wrong.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]
_CLOCKS_S = 1.0


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    check: str
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}; fix: {self.fix}"


@dataclass
class Finding:
    """The end of one check."""

    check: str
    text: str = ""  # what was measured
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, where: str, what: str, fix: str) -> None:
        """Add a fault of this check."""
        self.faults.append(Fault(self.check, where, what, fix))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short: 0-3,6."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def many(count: int, word: str) -> str:
    """'1 rank', '4 ranks'."""
    return f"{count} {word}{'s' * (count != 1)}"


def where(facts: Sequence[Facts]) -> str:
    """The ranks and nodes of some facts, in short: ranks 0-3 on n1, rank 4 on n2."""
    texts = []
    hosts = by_host(facts)
    for name in list(hosts)[:8]:
        ranks = [f["rank"] for f in hosts[name]]
        texts.append(f"rank{'s' * (len(set(ranks)) > 1)} {ranges(ranks)} on {name}")
    return ", ".join(texts) + (f" and {len(hosts) - 8} more nodes" if len(hosts) > 8 else "")


def by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The facts of each node."""
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for one in facts:
        hosts[one["host"]].append(one)
    return hosts


def grouped(facts: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    """The facts that have the same value, by that value; those with an empty one are left out."""
    groups: dict[Any, list[Facts]] = defaultdict(list)
    for one in facts:
        if value := key(one):
            groups[value].append(one)
    return groups


def one_machine(facts: Sequence[Facts]) -> bool:
    """Whether all share a kernel and a network, be they several nodes by name."""
    return len({f["machine"] for f in facts}) == 1


def presence(
    facts: Sequence[Facts], expected: int, waited_s: float, heard: Sequence[Facts]
) -> Finding:
    """Every process that was started has come, and could say how it is."""
    found = Finding("presence", f"{many(expected, 'rank')} came within {waited_s:.1f} s")
    chief = facts[0]
    if len(facts) >= expected:
        return found
    came = {f["rank"] for f in facts}
    stuck = [f for f in heard if f["rank"] not in came]
    if stuck:
        text = f"came, and could say nothing of themselves within {waited_s:.0f} s"
        fix = "a file system, a name server or a GPU's driver hangs there: look at dmesg and df on "
        found.fault(where(stuck), text, fix + "that node, or leave it out with --exclude")
    absent = sorted(set(range(expected)) - came - {f["rank"] for f in stuck})
    nodes, per_node = chief["nodes"], max(chief["local_world_size"], 1)
    homes: dict[str, list[int]] = defaultdict(list)
    for rank in absent:
        at = rank // per_node
        homes[nodes[at] if at < len(nodes) else "a node not known"].append(rank)
    for name, ranks in homes.items():
        found.fault(
            f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} on {name}",
            f"did not come within {waited_s:.0f} s",
            f"look at {name} and at the error lines of these ranks (did they start? can they reach "
            f"{chief['master_addr']}?), or leave the node out with --exclude={name}",
        )
    return found


def places(facts: Sequence[Facts]) -> Finding:
    """Each rank once, ranks of a node one after the other, and the world as large as the step."""
    hosts = by_host(facts)
    spread = ", ".join(
        f"{h} {ranges(f['rank'] for f in own)}" for h, own in list(hosts.items())[:8]
    )
    found = Finding("ranks", f"each rank once; {spread}" + ", ..." * (len(hosts) > 8))
    by_hand = "start ranks with srun as run.sh does, and export no RANK, WORLD_SIZE or SLURM_* "
    by_hand += "variable in the batch script: there they have one value for all ranks"
    for text, own in grouped(facts, lambda f: f["place_fault"]).items():
        found.fault(where(own), text, by_hand)
    for rank, count in sorted(Counter(f["rank"] for f in facts).items()):
        if count > 1:
            twins = [f for f in facts if f["rank"] == rank]
            nodes = ", ".join(f"{h} ({len(o)})" for h, o in list(by_host(twins).items())[:8])
            found.fault(nodes, f"{count} processes believe that they are rank {rank}", by_hand)
    for one in () if found.faults else facts:
        size = one["local_world_size"]
        if one["rank"] % size != one["local_rank"] or any(
            f["rank"] // size != one["rank"] // size for f in hosts[one["host"]]
        ):
            text = f"rank is not node * {size} + local_rank (local_rank {one['local_rank']})"
            found.fault(
                where([one]), text, "srun --distribution=block, with the same number a node"
            )
    return found


def world(facts: Sequence[Facts]) -> Finding:
    """All ranks say the same world size, and it is the number of tasks."""
    size = facts[0]["world_size"]
    found = Finding("world", f"world size {size} on {many(len(by_host(facts)), 'node')}")
    if facts[0]["tasks"]:
        found.text += f", as the step's {facts[0]['tasks']} tasks"
    fix = "unset WORLD_SIZE, and do not set SLURM_NTASKS by hand; sizes come from --nodes and "
    fix += "--ntasks-per-node"
    wrong = [f for f in facts if f["tasks"] not in (None, f["world_size"]) and not f["place_fault"]]
    for (said, tasks), own in grouped(wrong, lambda f: (f["world_size"], f["tasks"])).items():
        found.fault(where(own), f"world size is {said} and the step has {tasks} tasks", fix)
    sizes = grouped(facts, lambda f: f["world_size"])
    if len(sizes) > 1 and not wrong and not any(f["place_fault"] for f in facts):
        text = ", ".join(f"{s} ({where(own)})" for s, own in sizes.items())
        found.fault("all", f"ranks differ in the world size: {text}", fix)
    return found


def gpus(facts: Sequence[Facts]) -> Finding:
    """Each rank of a node has a GPU of its own, by UUID; or none has one."""
    found = Finding("gpus", "none visible: the ranks compute on their CPUs")
    fix = "ask for one GPU a rank (--gpus-per-node as --ntasks-per-node), or say --device cpu"
    for text, own in grouped(facts, lambda f: f.get("gpu_fault")).items():
        found.fault(where(own), text, fix)
    with_gpu = [f for f in facts if f["gpus"]]
    if 0 < len(with_gpu) < len(facts) and not found.faults:
        without = [f for f in facts if not f["gpus"]]
        found.fault(where(without), "no GPU is visible, and other ranks have one", fix)
    for (host, uuid), own in grouped(
        [f for f in with_gpu if f.get("gpu")], lambda f: (f["host"], f["gpu"])
    ).items():
        if len(own) > 1:
            text = f"{len(own)} ranks are on one GPU, {uuid} (host {host})"
            found.fault(where(own), text, fix)
    if with_gpu:
        kinds = Counter(f.get("gpu_name", "unknown") for f in with_gpu)
        found.text = f"one a rank, no two ranks on one: {', '.join(sorted(kinds))}"
        if len(kinds) > 1:
            found.notes.append(f"gpus: of several kinds, the slowest sets the pace: {dict(kinds)}")
    return found


def cores(facts: Sequence[Facts]) -> Finding:
    """No rank is bound to another's cores, nor to fewer than it has threads."""
    found = Finding("cores")
    fix = "srun --cpu-bind=cores and --cpus-per-task (sbatch and srun both), and no taskset or "
    fix += "KMP_AFFINITY around Python"
    texts = []
    for host, own in by_host(facts).items():
        sets = {frozenset(f["cores"]) for f in own}
        total, least = frozenset.union(*sets), min(map(len, sets))
        bound = len(total) < own[0]["machine_cores"]
        if len(own) > 1 and len(sets) == 1 and least < len(own) and bound:
            text = f"all share {many(least, 'core')} ({ranges(total)}) of "
            found.fault(where(own), text + str(own[0]["machine_cores"]), fix)
        elif len(sets) > 1 and sum(map(len, sets)) > len(total):
            pairs = ", ".join(f"rank {f['rank']}: {ranges(f['cores'])}" for f in own[:4])
            found.fault(where(own), f"bound to cores that overlap ({pairs})", fix)
        found.notes += _crowded(host, own, len(total))
        shared = f", shared by {len(own)} ranks" if len(sets) < len(own) else " a rank"
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
    return [f"cores: {host} has {cores} for {threads} threads of {len(own)} ranks: they take turns"]


def loopback(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses at which a machine reaches only itself."""
    return [a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback]


def names(facts: Sequence[Facts]) -> Finding:
    """The master's name, and between nodes each node's own, resolve to what others can reach."""
    chief = facts[0]
    addr, port = chief["master_addr"], chief["master_port"]
    ips = ", ".join(chief["master_ips"][:2])
    at = f"{addr}{f':{port}' * bool(port)}"
    found = Finding("master", f"{at} is {ips}, reached from {many(len(by_host(facts)), 'node')}")
    nodes = max(len(by_host(facts)), len(chief["nodes"]))
    # Nodes that are simulated on one machine do reach each other at its loopback.
    if nodes == 1 or (one_machine(facts) and len(by_host(facts)) == nodes):
        return found
    fix = "take the name from the 127.x line of /etc/hosts there, or set MASTER_ADDR to the "
    fix += "address of the fast interface (a site profile's interface suffix does that)"
    for ip, own in grouped(facts, lambda f: next(iter(loopback(f["master_ips"])), "")).items():
        found.fault(where(own), f"the master's name {addr} resolves to {ip} between nodes", fix)
    fix = "take the name from the 127.x line of /etc/hosts, or set GLOO_SOCKET_IFNAME to the "
    fix += "interface that the nodes share"
    for one in facts if not found.faults else ():
        own_loop = loopback(one["own_ips"])
        if not one["interface"] and (own_loop or not one["own_ips"]):
            text = f"resolves to {own_loop[0]}" if own_loop else "does not resolve"
            text = f"its own name {one['hostname']} {text}: Gloo would offer that to other nodes"
            found.fault(where([one]), text, fix)
    return found


def versions(facts: Sequence[Facts]) -> Finding:
    """The same Python, torch and jobkit everywhere."""
    commit = next((f["commit"] for f in facts if f.get("commit")), "none")
    text = ", ".join(f"{name} {value}" for name, value in facts[0]["versions"].items())
    found = Finding("versions", f"{text}, commit {commit[:12]}")
    for name in sorted({name for f in facts for name in f["versions"]}):
        values = grouped(facts, lambda f, name=name: f["versions"].get(name, "none"))  # type: ignore[misc]
        if len(values) > 1:
            usual = max(values, key=lambda value: len(values[value]))
            for value, own in values.items():
                if value != usual:
                    text = f"{name} is {value}, and {usual} on the other ranks"
                    fix = "use one environment and one checkout on all nodes: a shared file system "
                    found.fault(where(own), text, fix + "or one container image; check PYTHONPATH")
    return found


def clocks(facts: Sequence[Facts]) -> Finding:
    """Clocks differ by a second at most, the error of the measurement taken off."""
    ahead = [f["clock_ahead_s"] for f in facts]
    bound = max(f["clock_error_s"] for f in facts)
    spread = max(ahead) - min(ahead)
    found = Finding("clocks", f"within {spread:.4f} s (known to {bound:.4f} s)")
    # The desk's own clock may be the wrong one: what most say is the time.
    with_desk = sum(abs(a) <= _CLOCKS_S for a in ahead)
    middle = 0.0 if 2 * with_desk >= len(ahead) else sorted(ahead)[len(ahead) // 2]
    for name, own in by_host(facts).items():
        off = [f["clock_ahead_s"] - middle for f in own]
        worst = max(off, key=abs)
        if abs(worst) - bound > _CLOCKS_S:
            text = f"the clock is {abs(worst):.1f} s {'ahead' if worst > 0 else 'behind'}"
            fix = f"ask the site to mend {name}'s time service (chronyc tracking), or --exclude it"
            found.fault(where(own), text, fix)
    return found


def writable(facts: Sequence[Facts]) -> Finding:
    """Each node can write to the run's folder."""
    found = Finding(
        "logs", f"{facts[0]['log_dir']} is writable from {many(len(by_host(facts)), 'node')}"
    )
    for text, own in grouped(facts, lambda f: f["log_fault"]).items():
        fix = "choose a folder on a file system of all nodes with --run-dir (or JOBKIT_LOGS)"
        found.fault(where(own), f"{own[0]['log_dir']} cannot be written: {text}", fix)
    return found
