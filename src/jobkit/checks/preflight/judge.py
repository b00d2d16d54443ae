"""The checks of a preflight on what its ranks report: pure functions, one per check.

Each returns what was measured, and what is wrong with its fix.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]

# Where one of these found a fault, a group would only hang, or fail for a reason already reported.
NEEDED_FOR_A_GROUP = ("presence", "ranks", "gpus", "master", "port")
MIN_CORES_PER_GPU = 4  # Python, autograd, NCCL's proxies, checkpoints: a thread each
_ABSURD_MB_PER_S = 10.0  # less than Fast Ethernet: training would only wait
_MIN_NCCL_MB_PER_S = 5000.0  # where no rate is known: TCP over a fast network gives 1 to 3 GB/s
_MIN_GLOO_MB_PER_S = 100.0
_MIN_SHARE_OF_RATE = 0.25  # chosen, of the fastest interface's: TCP reaches a tenth of 200 Gb/s

HUNG_NODE = (
    "a file system, a name server or a GPU's driver hangs there: check dmesg and df on that node, "
    "or leave it out with --exclude"
)
_START_WITH_SRUN = (
    "start ranks with srun as run.sh does, give --nodes and --ntasks-per-node, and export no RANK, "
    "WORLD_SIZE or SLURM_* variable in the batch script"
)
_BLOCK = "srun --distribution=block, with the same number of ranks on each node"
_GPU_PER_RANK = "ask for one GPU per rank (--gpus-per-node as --ntasks-per-node), or --device cpu"
_TORCH_FOR_GPU = (
    "install a torch for this driver and GPU (make LOCK= venv, with PIP_INDEX_URL of PyTorch's "
    "cu126 or cu128 wheels), or use the site's container"
)
_BIND_CORES = "srun --cpu-bind=cores and --cpus-per-task (sbatch and srun both), and no taskset"
_NAME = (
    "take the name from the 127.x line of /etc/hosts there, or set MASTER_ADDR (a site profile's "
    "interface suffix does that) and GLOO_SOCKET_IFNAME"
)
_SAME_CODE = "use one environment and one checkout on all nodes, or one container; check PYTHONPATH"
_SHARED_FOLDER = "choose a folder on a file system of all nodes with --run-dir (or JOBKIT_LOGS)"
_FREE_PORT = "end the program that holds it (ss -ltnp shows it), or set another MASTER_PORT"
_PREPARE = (
    "python -m jobkit prepare --dataset {} on a login node, on a file system of all nodes, and the "
    "same --data-dir (or JOBKIT_DATA_DIR) for the job"
)
_REACH = (
    "let the nodes reach each other on all ports, and set NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME to the fast interface that they share; NCCL_DEBUG=INFO says more"
)
_WRONG_SUM = (
    "do not train here: try NCCL_LL128_C2C=0 (GH200 with Slingshot), then another version of NCCL, "
    "and show the site this line"
)
_TCP = (
    "check NCCL_NET, NCCL_IB_DISABLE, NCCL_IB_HCA, and that a container has the network's devices "
    "and NCCL's plug-in; on Slingshot NCCL_NET='AWS Libfabric' (or OFI) makes it fail instead"
)
_NO_PEER = (
    "GPUs of a node copy by way of the host's memory: let each rank see all GPUs of its node "
    "(--gpu-bind=none), and check NCCL_P2P_DISABLE and ACS"
)


@dataclass
class CheckResult:
    """What one check measured, what is wrong, and what may slow a training down."""

    check: str
    text: str = ""  # what was measured
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, place: str, what: str, fix: str) -> None:
        self.faults.append(f"{place}: {what}; fix: {fix}")

    def fault_each(self, facts: Sequence[Facts], texts: Iterable[str], fix: str) -> None:
        """Add the text of each of the facts as a fault: none if it is empty, one for equal ones."""
        for text, same in grouped(facts, texts).items():
            self.fault(where(same), text, fix)

    def lines(self) -> list[str]:
        """The lines for people: one for each fault and note, or one for what was measured."""
        lines = [f"FAULT {self.check}: {fault}" for fault in self.faults]
        if self.text and not self.faults:
            lines.append(f"ok {self.check}: {self.text}")
        return lines + [f"note {self.check}: {note}" for note in self.notes]


# --- how ranks and nodes are written --------------------------------------------------------------


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short: 0-3,6."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def counted(count: int, word: str) -> str:
    """A count with its word: 1 rank, 4 ranks."""
    return f"{count} {word}{'s' * (count != 1)}"


def where(facts: Sequence[Facts]) -> str:
    """The ranks and nodes of some facts in short: ranks 0-3 on n1, rank 4 on n2."""
    hosts, texts = by_host(facts), []
    for host, same in [*hosts.items()][:8]:
        numbers = {f["rank"] for f in same}
        texts.append(f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)} on {host}")
    return ", ".join(texts) + (f" and {len(hosts) - 8} more nodes" if len(hosts) > 8 else "")


def nodes_of(facts: Sequence[Facts]) -> str:
    return counted(len(by_host(facts)), "node")


def by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    return grouped(facts, [f["host"] for f in facts])


def grouped(facts: Sequence[Facts], values: Iterable[Any]) -> dict[Any, list[Facts]]:
    """The facts by a value of each; those whose value is empty are left out."""
    groups: dict[Any, list[Facts]] = defaultdict(list)
    for fact, value in zip(facts, values, strict=True):
        if value:
            groups[value].append(fact)
    return groups


# --- what each rank found out alone ---------------------------------------------------------------


def judge_facts(
    facts: Sequence[Facts],
    expected: int,
    waited_s: float,
    port_fault: str,
    connected: Sequence[Facts] = (),
) -> list[CheckResult]:
    """All checks of what each rank found out alone; the first facts are those of the first rank.

    expected: processes that were started. port_fault: why the master's port cannot be used.
    connected: rank and host of all that connected, those included that then hung.
    """
    return [
        environment(facts),
        presence(facts, expected, waited_s, connected),
        ranks(facts),
        gpus(facts),
        cores(facts),
        master(facts),
        port(facts[0], port_fault),
        versions(facts),
        logs(facts),
    ]


def environment(facts: Sequence[Facts]) -> CheckResult:
    """Driver, torch's CUDA and the architectures that torch was built for: shown first."""
    torch = facts[0]["versions"]["torch"]
    shown = [f for f in facts if f["driver"] or f["architectures"]]
    if not shown:
        return CheckResult("environment", f"torch {torch}, no GPU driver found")
    architectures, runtime = shown[0]["architectures"], shown[0]["torch_cuda"] or "none"
    built = " ".join(architectures) or "unknown architectures"
    driver = shown[0]["driver"] or "unknown"
    text = f"driver {driver}; torch {torch} for CUDA {runtime}; built for {built}"
    result = CheckResult("environment", text)
    unfit = [
        f
        for f in shown
        if f["capability"]
        and architectures
        and not any(runs_on(name, f["capability"]) for name in architectures)
    ]
    texts = [f"the GPU is {f['capability']}, and torch was built for {built}" for f in unfit]
    result.fault_each(unfit, texts, _TORCH_FOR_GPU)
    return result


def runs_on(architecture: str, capability: str) -> bool:
    """Whether code for an architecture runs on a GPU: sm_80 on 8.0 to 8.9, compute_80 on newer."""
    kind, _, digits = architecture.partition("_")
    number, gpu = digits.rstrip("af"), capability.removeprefix("sm_")
    if not (number.isdigit() and gpu.isdigit()):
        return True  # not NVIDIA's
    if kind == "compute":
        return int(number) <= int(gpu)
    return number[:-1] == gpu[:-1] and int(number) <= int(gpu)


def presence(
    facts: Sequence[Facts], expected: int, waited_s: float, connected: Sequence[Facts]
) -> CheckResult:
    """Every process that was started has connected, and reported its facts."""
    text = f"{counted(expected, 'rank')} connected within {waited_s:.1f} s"
    result = CheckResult("presence", text)
    if len(facts) >= expected:
        return result
    reported = {f["rank"] for f in facts}
    if stuck := [f for f in connected if f["rank"] not in reported]:
        text = f"connected but did not report within {waited_s:.0f} s"
        result.fault(where(stuck), text, HUNG_NODE)
    nodes, per_node = dict(enumerate(facts[0]["nodes"])), facts[0]["local_world_size"]
    absent = [
        {"rank": rank, "host": nodes.get(rank // per_node, "an unknown node")}
        for rank in sorted(set(range(expected)) - reported - {f["rank"] for f in stuck})
    ]
    for name, same in by_host(absent).items():
        fix = f"check {name} and the error lines of these ranks (did they start? can they reach "
        fix += f"{facts[0]['master_addr']}?)"
        fix += f", or leave the node out with --exclude={name}" if nodes else ""
        result.fault(where(same), f"did not connect within {waited_s:.0f} s", fix)
    return result


def ranks(facts: Sequence[Facts]) -> CheckResult:
    """Each rank is there once, those of a node follow each other, and the world size is right."""
    hosts, size = by_host(facts), facts[0]["world_size"]
    result = CheckResult("ranks", f"world size {size}, each rank once; {where(facts)}")
    for name, same in grouped(facts, [f"rank {f['rank']}" for f in facts]).items():
        if len(same) > 1:
            nodes = [f"{host} ({len(there)})" for host, there in by_host(same).items()]
            text = f"{len(same)} processes believe that they are {name}"
            result.fault(", ".join(nodes[:8]), text, _START_WITH_SRUN)
    wrong = [f for f in facts if f["tasks"] not in (None, f["world_size"])]
    texts = [f"world size is {f['world_size']} and the step has {f['tasks']} tasks" for f in wrong]
    result.fault_each(wrong, texts, _START_WITH_SRUN)
    sizes = grouped(facts, [f["world_size"] for f in facts])
    if len(sizes) > 1 and not wrong:
        text = ", ".join(f"{size} ({where(same)})" for size, same in sizes.items())
        result.fault("all", f"ranks differ in the world size: {text}", _START_WITH_SRUN)
    for fact in () if result.faults else facts:
        per_node, rank = fact["local_world_size"], fact["rank"]
        if rank % per_node != fact["local_rank"] or any(
            f["rank"] // per_node != rank // per_node for f in hosts[fact["host"]]
        ):
            text = f"rank is not node * {per_node} + local_rank (local_rank {fact['local_rank']})"
            result.fault(where([fact]), text, _BLOCK)
    return result


def gpus(facts: Sequence[Facts]) -> CheckResult:
    """Each rank of a node has a GPU to itself, or no rank has one.

    Two MIG instances of one GPU have a PCI address in common, and NCCL refuses them.
    """
    result = CheckResult("gpus", "none visible: the ranks compute on their CPUs")
    for text, same in grouped(facts, [f["gpu_fault"] for f in facts]).items():
        result.fault(where(same), text, _TORCH_FOR_GPU if "driver" in text else _GPU_PER_RANK)
    with_gpu, without = ([f for f in facts if bool(f["gpus"]) is has] for has in (True, False))
    if with_gpu and without and not result.faults:
        result.fault(where(without), "no GPU is visible, and other ranks have one", _GPU_PER_RANK)
    for key in ("gpu", "gpu_bus"):
        places = [f[key] and (f["host"], f[key]) for f in with_gpu]
        for (host, gpu), same in grouped(with_gpu, places).items():
            if len(same) > 1 and not result.faults:
                text = f"{len(same)} ranks are on one GPU, {gpu} (host {host})"
                result.fault(where(same), text, _GPU_PER_RANK)
    if kinds := sorted({f["gpu_name"] for f in with_gpu}):
        result.text = f"one per rank, none shared: {', '.join(kinds)}"
        if len(kinds) > 1:
            result.notes.append("mixed GPU models: the slowest limits all")
    return result


def cores(facts: Sequence[Facts]) -> CheckResult:
    """No rank is bound to another's cores, or to fewer than it has threads."""
    result, texts = CheckResult("cores"), []
    for host, same in by_host(facts).items():
        sets = {frozenset(f["cores"]) for f in same}
        total, least = frozenset.union(*sets), min(map(len, sets))
        machine, threads = same[0]["machine_cores"], sum(f["threads"] for f in same)
        if len(same) > 1 and len(sets) == 1 and least < len(same) and least < machine:
            text = f"all share {counted(least, 'core')} ({ranges(total)}) of {machine}"
            result.fault(where(same), text, _BIND_CORES)
        elif len(sets) > 1 and sum(map(len, sets)) > len(total):
            pairs = ", ".join(f"rank {f['rank']}: {ranges(f['cores'])}" for f in same[:4])
            result.fault(where(same), f"bound to cores that overlap ({pairs})", _BIND_CORES)
        if threads > len(total):
            of = f"{threads} threads of {len(same)} ranks"
            result.notes.append(f"{host} has {len(total)} for {of}: cores oversubscribed")
        if same[0]["gpus"] and len(total) < MIN_CORES_PER_GPU * len(same):
            result.notes.append(
                f"{host} has {counted(len(total), 'core')} for {counted(len(same), 'GPU')}, which "
                f"then wait for the host: ask for --cpus-per-task={MIN_CORES_PER_GPU} or more"
            )
        shared = f", shared by {len(same)} ranks" if len(sets) < len(same) else " per rank"
        texts.append(f"{host} {least} of {machine} cores{shared}")
    result.text = "; ".join(texts[:4]) + "; ..." * (len(texts) > 4)
    few = [f for f in facts if len(f["cores"]) < f["threads"]]
    counts = [(f["threads"], len(f["cores"])) for f in few]
    for (threads, count), same in grouped(few, counts).items():
        text = f"{threads} threads on {counted(count, 'core')}"
        result.fault(where(same), text, f"OMP_NUM_THREADS={count}, or more --cpus-per-task")
    return result


def master(facts: Sequence[Facts]) -> CheckResult:
    """The master's name, and each node's own, resolve to what others can reach."""
    chief, hosts = facts[0], len(by_host(facts))
    name, number = chief["master_addr"], chief["master_port"]
    text = f"{name}:{number}" if number else name
    text += f" is {', '.join(chief['master_ips'][:2])}, reached from {nodes_of(facts)}"
    result = CheckResult("master", text)
    nodes = max(hosts, len(chief["nodes"]))
    # Nodes that are simulated on one machine do reach each other at its loopback.
    if nodes == 1 or (len({f["machine"] for f in facts}) == 1 and hosts == nodes):
        return result
    for ip, same in grouped(facts, [_loopback(f["master_ips"]) for f in facts]).items():
        text = f"the master's name {name} resolves to {ip} between nodes"
        result.fault(where(same), text, _NAME)
    for fact in () if result.faults else facts:
        loop = _loopback(fact["own_ips"])
        if not fact["interface"] and (loop or not fact["own_ips"]):
            text = f"resolves to {loop}" if loop else "does not resolve"
            text = f"its own name {fact['hostname']} {text}: Gloo would offer that to other nodes"
            result.fault(where([fact]), text, _NAME)
    return result


def _loopback(addresses: Iterable[str]) -> str:
    """The first of the addresses at which a machine reaches only itself; empty for none."""
    loops = (a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback)
    return next(loops, "")


def port(chief: Facts, fault: str) -> CheckResult:
    """The master's port is free, for torch's store to listen on."""
    number = chief["master_port"]
    result = CheckResult("port", f"{number} is free" if number else "none needed: one process")
    if fault:
        at = f"{chief['host']} ({chief['master_addr']})"
        result.fault(at, f"port {number} cannot be used: {fault}", _FREE_PORT)
    return result


def versions(facts: Sequence[Facts]) -> CheckResult:
    """Python, torch and jobkit are the same on all ranks."""
    text = ", ".join(f"{name} {value}" for name, value in facts[0]["versions"].items())
    result = CheckResult("versions", text)
    for name in sorted({name for f in facts for name in f["versions"]}):
        values = [f["versions"].get(name, "none") for f in facts]
        ((usual, _),) = Counter(values).most_common(1)
        texts = [v != usual and f"{name} is {v}, and {usual} on the other ranks" for v in values]
        result.fault_each(facts, texts, _SAME_CODE)
    return result


def logs(facts: Sequence[Facts]) -> CheckResult:
    """Each node can write to the run's folder."""
    folder = facts[0]["log_dir"]
    result = CheckResult("logs", f"{folder} is writable from {nodes_of(facts)}")
    blocked = [f for f in facts if f["log_fault"]]
    texts = [f"{f['log_dir']} cannot be written: {f['log_fault']}" for f in blocked]
    result.fault_each(blocked, texts, _SHARED_FOLDER)
    return result


# --- what the ranks did together ------------------------------------------------------------------


def judge_together(
    facts: Sequence[Facts], results: Sequence[Facts], task: Mapping[str, Any]
) -> list[CheckResult]:
    """All checks of what the ranks did together, given the coordinator's task."""
    shared, folder = CheckResult("shared"), facts[0]["log_dir"]
    if task["probe"]:
        shared.text = f"{folder} is the same folder on {nodes_of(facts)}"
        if blind := [r for r in results if r["hidden"]]:
            text = f"{folder} is another folder here: a file of the master's node is not there"
            shared.fault(where(blind), text, _SHARED_FOLDER)
    checks = [shared, data(facts, results)]
    if task["group"]:
        measured = (all_reduce, transports, bandwidth)
        return checks + [check(facts, results) for check in measured]
    note = "not checked, nor the bandwidth, because of the faults above"
    return [*checks, CheckResult("all_reduce", notes=[note])]


def data(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The cache is complete on every node, or rank 0 can make it for all."""
    result = CheckResult("data")
    chief = next((f for f in facts if "dataset" in f), None)
    if chief is None:
        result.notes.append("not checked: rank 0 did not report")
        return result
    name, cache, prepare = chief["dataset"], chief["cache"], _PREPARE.format(chief["dataset"])
    result.text = f"{name}: not prepared yet; rank 0 makes it in {chief['data_dir']}"
    if cache:
        result.text = f"{name}: {cache} complete on {nodes_of(facts)}"
    result.fault_each([chief], [chief["data_fault"]], prepare)
    for text, same in grouped(results, [r.get("cache_fault") for r in results]).items():
        result.fault(where(same), f"{cache} cannot be used: {text}", prepare)
    return result


def all_reduce(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The sum over all ranks is right on every rank, and large sums between the nodes are."""
    size, reported = len(facts), {r["rank"] for r in results}
    total = size * (size + 1) / 2
    result = CheckResult("all_reduce")
    result.fault_each(results, [r.get("group_fault", "") for r in results], _REACH)
    if silent := [f for f in facts if f["rank"] not in reported]:
        result.fault(where(silent), "ended or hung during the all_reduce", _REACH)
    wrong = [r for r in results if r.get("sum", total) != total]
    texts = [f"the sum is {r['sum']}, and {total} is right" for r in wrong]
    result.fault_each(wrong, texts, _REACH)
    result.fault_each(results, [r.get("wrong_sums", "") for r in results], _WRONG_SUM)
    if not result.faults:
        latency = f"{results[0]['latency_us']:.0f} us"
        with_ = f"{counted(size, 'rank')} with {results[0]['backend']}"
        result.text = f"right over {with_}; latency {latency}"
    return result


def transports(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """Which way NCCL took between which ranks, with notes on the slow ones."""
    result = CheckResult("transports")
    if not any(r.get("backend") == "nccl" for r in results):
        return result
    hosts = {f["rank"]: f["host"] for f in facts}
    ways: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for first, second, way in (link for r in results for link in r.get("links", [])):
        ways[way].add((first, second))
    if not ways:
        result.notes.append("NCCL's log has no line of a connection (NCCL_DEBUG_FILE)")
    result.text = "; ".join(f"{way} between {_pairs(ways[way])}" for way in sorted(ways))
    fast = sorted({name for f in facts for name in f.get("nics", {})})
    for way, pairs in sorted(ways.items()):
        near = {pair for pair in pairs if hosts.get(pair[0]) == hosts.get(pair[1])}
        if way.startswith("NET/Socket"):
            there = f", and there are {', '.join(fast[:4])}" if fast else ""
            result.notes.append(f"NCCL uses TCP ({way}) between {_pairs(pairs)}{there}: {_TCP}")
        elif way.startswith(("NET/", "SHM")) and near:
            result.notes.append(f"{way} between {_pairs(near)} of a node: {_NO_PEER}")
        elif way.startswith("NET/") and not way.endswith("GDRDMA"):
            result.notes.append(
                f"{way} between {_pairs(pairs)} is without GPUDirect RDMA: it copies by way of the "
                "host's memory (nvidia_peermem or dma-buf is missing)"
            )
    return result


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    numbers = sorted(pairs)
    first = ", ".join(f"{a}-{b}" for a, b in numbers[:3]) + ", ..." * (len(numbers) > 3)
    return f"{counted(len(numbers), 'pair')} of ranks ({first})"


def bandwidth(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The bandwidth of an all_reduce between the nodes; a fault where it is absurd.

    Only between nodes: inside a node there is no interface that could be the wrong one. With NCCL
    a share of the rate of each node's fastest interface is expected, the least over the nodes.
    """
    timed = next((r for r in results if "bus_mb_per_s" in r), None)
    if timed is None:
        return CheckResult("bandwidth", "" if len(facts) > 1 else "one rank: nothing to measure")
    nodes = len(by_host(facts)) > 1
    speed, backend = timed["bus_mb_per_s"], timed["backend"]
    between = f"between {timed['members']} {'nodes' if nodes else 'ranks of a node'}"
    text = f"busbw {speed / 1e3:.3g} GB/s {between} (all_reduce of {timed['mib']:g} MiB)"
    result, expected = CheckResult("bandwidth", text), _MIN_GLOO_MB_PER_S
    if backend == "nccl":
        rates = [max(f["nics"].values()) for f in facts if f.get("nics")]
        expected = min(rates) / 8 * 1000 * _MIN_SHARE_OF_RATE if rates else _MIN_NCCL_MB_PER_S
    if speed < _ABSURD_MB_PER_S and nodes:
        result.fault(where(results), text, _REACH)
    elif speed < expected and nodes:
        result.notes.append(
            f"{speed:.0f} MB/s is slow for {backend} on this network, of which {expected:.0f} are "
            "expected at least: check the interface"
        )
    return result
