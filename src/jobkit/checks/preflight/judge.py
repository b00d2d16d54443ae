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
_MIN_NCCL_MB_PER_S = 5000.0  # TCP over a fast network gives 1 to 3 GB/s
_MIN_GLOO_MB_PER_S = 100.0

HUNG_NODE = "a file system, name server or driver hangs: check dmesg and df there, or use --exclude"
_START_WITH_SRUN = (
    "start ranks with srun as run.sh does, give --nodes and --ntasks-per-node, and export no RANK, "
    "WORLD_SIZE or SLURM_* variable in the batch script"
)
_BLOCK = "srun --distribution=block, with the same number of ranks on each node"
_GPU_PER_RANK = "ask for one GPU per rank (--gpus-per-node as --ntasks-per-node), or --device cpu"
_TORCH = (
    "install a torch for this driver and GPU (make LOCK= venv, with PIP_INDEX_URL of PyTorch's "
    "cu126 or cu128 wheels), or use the site's container"
)
_SEE_GPU = "start a container with GPUs (Apptainer: --nv), take a torch with CUDA, or --device cpu"
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
    "(srun without --gpus-per-task), and check NCCL_P2P_DISABLE and ACS"
)
_NO_RDMA = "it copies by way of the host's memory (nvidia_peermem or dma-buf is missing)"


@dataclass
class CheckResult:
    """What one check measured, what is wrong, and what may slow a training down."""

    check: str
    text: str = ""  # what was measured
    faults: dict[tuple[str, str], list[Facts]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fault(self, facts: Iterable[Facts], text: str | None, fix: str) -> None:
        """Add what is wrong with some ranks, or nothing; what others have too is one fault."""
        if text:
            self.faults.setdefault((text, fix), []).extend(facts)

    def lines(self) -> list[str]:
        """The lines for people: one for each fault and note, or one for what was measured."""
        lines = [
            f"FAULT {self.check}: {where(facts)}: {text}; fix: {fix}"
            for (text, fix), facts in self.faults.items()
        ]
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


def by_host(facts: Iterable[Facts]) -> dict[str, list[Facts]]:
    return {host: same for (host,), same in grouped(facts, "host").items()}


def grouped(facts: Iterable[Facts], *keys: str) -> dict[tuple[Any, ...], list[Facts]]:
    """The facts by what they have under some keys."""
    groups: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        groups[tuple(fact[key] for key in keys)].append(fact)
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
    result = CheckResult("environment")
    torch = facts[0]["versions"]["torch"]
    shown = [f for f in facts if f["driver"] or f["architectures"]]
    if not shown:
        result.text = f"torch {torch}, no GPU driver found"
        return result
    architectures = shown[0]["architectures"]
    built = " ".join(architectures) or "unknown architectures"
    result.text = f"driver {shown[0]['driver'] or 'unknown'}; torch {torch} for CUDA "
    result.text += f"{shown[0]['torch_cuda'] or 'none'}; built for {built}"
    for fact in shown if architectures else ():
        gpu = fact["capability"]
        if gpu and not any(runs_on(name, gpu) for name in architectures):
            result.fault([fact], f"the GPU is {gpu}, and torch was built for {built}", _TORCH)
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
        result.fault(stuck, text, HUNG_NODE)
    nodes, per_node = dict(enumerate(facts[0]["nodes"])), facts[0]["local_world_size"]
    fix = "read the error lines of these ranks (did they start? can they reach "
    fix += f"{facts[0]['master_addr']}?), or leave the node out with --exclude"
    for rank in sorted(set(range(expected)) - reported - {f["rank"] for f in stuck}):
        absent = [{"rank": rank, "host": nodes.get(rank // per_node, "an unknown node")}]
        result.fault(absent, f"did not connect within {waited_s:.0f} s", fix)
    return result


def ranks(facts: Sequence[Facts]) -> CheckResult:
    """Each rank is there once, those of a node follow each other, and the world size is right."""
    size = facts[0]["world_size"]
    result = CheckResult("ranks", f"world size {size}, each rank once; {where(facts)}")
    for (rank,), same in grouped(facts, "rank").items():
        if len(same) > 1:
            text = f"{len(same)} processes believe that they are rank {rank}"
            result.fault(same, text, _START_WITH_SRUN)
    for fact in facts:
        unknown = fact["tasks"] is None
        right, which = (size, "on rank 0") if unknown else (fact["tasks"], "were started")
        if fact["world_size"] != right:
            text = f"world size is {fact['world_size']}, and {right} {which}"
            result.fault([fact], text, _START_WITH_SRUN)
    for same in () if result.faults else by_host(facts).values():
        for fact in same:
            per_node, local = fact["local_world_size"], fact["local_rank"]
            nodes = {f["rank"] // per_node for f in same}
            if fact["rank"] % per_node != local or len(nodes) > 1:
                text = f"rank is not node * {per_node} + local_rank (local_rank {local})"
                result.fault([fact], text, _BLOCK)
    return result


def gpus(facts: Sequence[Facts]) -> CheckResult:
    """Each rank of a node has a GPU to itself, or no rank has one.

    Two MIG instances of one GPU have a PCI address in common, and NCCL refuses them.
    """
    result = CheckResult("gpus", "none visible: the ranks compute on their CPUs")
    for fact in facts:
        fix = _TORCH if "driver" in fact["gpu_fault"] else _GPU_PER_RANK
        fix = _SEE_GPU if "granted" in fact["gpu_fault"] else fix
        result.fault([fact], fact["gpu_fault"], fix)
    with_gpu = [f for f in facts if f["gpus"]]
    without = [f for f in facts if not f["gpus"]]
    if with_gpu and without and not result.faults:
        result.fault(without, "no GPU is visible, and other ranks have one", _GPU_PER_RANK)
    for key in ("gpu", "gpu_bus"):
        for (_, gpu), same in grouped(with_gpu, "host", key).items():
            if len(same) > 1 and gpu and not result.faults:
                result.fault(same, f"{len(same)} ranks are on one GPU, {gpu}", _GPU_PER_RANK)
    if kinds := sorted({f["gpu_name"] for f in with_gpu}):
        result.text = f"one per rank, none shared: {', '.join(kinds)}"
        if len(kinds) > 1:
            result.notes.append("mixed GPU models: the slowest limits all")
    return result


def cores(facts: Sequence[Facts]) -> CheckResult:
    """No rank is bound to another's cores, or to fewer than it has threads."""
    each, machines = ({len(f["cores"]) for f in facts}, {f["machine_cores"] for f in facts})
    of = " of ".join(" to ".join(map(str, sorted({min(n), max(n)}))) for n in (each, machines))
    shared = len({(f["host"], *f["cores"]) for f in facts}) < len(facts)
    text = f"{of} cores for each rank{', shared with others of its node' * shared}"
    result = CheckResult("cores", text)
    for host, same in by_host(facts).items():
        sets = {frozenset(f["cores"]) for f in same}
        total, least = frozenset.union(*sets), min(map(len, sets))
        machine, threads = same[0]["machine_cores"], sum(f["threads"] for f in same)
        too_few = len(sets) == 1 and least < min(len(same), machine)
        if too_few or sum(map(len, sets)) > len(total):
            pairs = ", ".join(f"rank {f['rank']}: {ranges(f['cores'])}" for f in same[:4])
            result.fault(same, f"bound to cores that overlap ({pairs} of {machine})", _BIND_CORES)
        if threads > len(total):
            of = f"{threads} threads of {len(same)} ranks"
            result.notes.append(f"{host} has {len(total)} for {of}: cores oversubscribed")
        if same[0]["gpus"] and len(total) < MIN_CORES_PER_GPU * len(same):
            result.notes.append(
                f"{host} has {counted(len(total), 'core')} for {counted(len(same), 'GPU')}, which "
                f"then wait for the host: ask for --cpus-per-task={MIN_CORES_PER_GPU} or more"
            )
    for fact in facts:
        if (count := len(fact["cores"])) < fact["threads"]:
            fix = f"OMP_NUM_THREADS={count}, or more --cpus-per-task"
            result.fault([fact], f"{fact['threads']} threads on {counted(count, 'core')}", fix)
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
    for fact in facts:
        ip = _loopback(fact["master_ips"])
        result.fault(
            [fact], ip and f"the master's name {name} resolves to {ip} between nodes", _NAME
        )
    for fact in () if result.faults else facts:
        loop = _loopback(fact["own_ips"])
        if not fact["interface"] and (loop or not fact["own_ips"]):
            text = f"resolves to {loop}" if loop else "does not resolve"
            text = f"its own name {fact['hostname']} {text}: Gloo would offer that to other nodes"
            result.fault([fact], text, _NAME)
    return result


def _loopback(addresses: Iterable[str]) -> str:
    """The first of the addresses at which a machine reaches only itself; empty for none."""
    loops = (a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback)
    return next(loops, "")


def port(chief: Facts, fault: str) -> CheckResult:
    """The master's port is free, for torch's store to listen on."""
    number = chief["master_port"]
    result = CheckResult("port", f"{number} is free" if number else "none needed: one process")
    result.fault([chief], fault and f"port {number} cannot be used: {fault}", _FREE_PORT)
    return result


def versions(facts: Sequence[Facts]) -> CheckResult:
    """Python, torch and jobkit are the same on all ranks."""
    text = ", ".join(f"{name} {value}" for name, value in facts[0]["versions"].items())
    result = CheckResult("versions", text)
    for name in dict.fromkeys(name for f in facts for name in f["versions"]):
        values = [f["versions"].get(name, "none") for f in facts]
        ((usual, _),) = Counter(values).most_common(1)
        for fact, value in zip(facts, values, strict=True):
            text = f"{name} is {value}, and {usual} on the other ranks" * (value != usual)
            result.fault([fact], text, _SAME_CODE)
    return result


def logs(facts: Sequence[Facts]) -> CheckResult:
    """Each node can write to the run's folder."""
    folder = facts[0]["log_dir"]
    result = CheckResult("logs", f"{folder} is writable from {nodes_of(facts)}")
    for fact in facts:
        text = fact["log_fault"] and f"{fact['log_dir']} cannot be written: {fact['log_fault']}"
        result.fault([fact], text, _SHARED_FOLDER)
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
            shared.fault(blind, text, _SHARED_FOLDER)
    checks = [shared, data(facts)]
    if task["group"]:
        measured = (all_reduce, transports, bandwidth)
        return checks + [check(facts, results) for check in measured]
    note = "not checked, nor the bandwidth, because of the faults above"
    return [*checks, CheckResult("all_reduce", notes=[note])]


def data(facts: Sequence[Facts]) -> CheckResult:
    """The cache is there on the node of rank 0, or rank 0 can make it for all."""
    result = CheckResult("data")
    chief = next((f for f in facts if "dataset" in f), None)
    if chief is None:
        result.notes.append("not checked: rank 0 did not report")
        return result
    name, cache, prepare = chief["dataset"], chief["cache"], _PREPARE.format(chief["dataset"])
    result.text = f"{name}: not prepared yet; rank 0 makes it in {chief['data_dir']}"
    if cache:
        result.text = f"{name}: {cache} is there on {chief['host']}"
    result.fault([chief], chief["data_fault"], prepare)
    return result


def all_reduce(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The sum over all ranks is right on every rank, and large sums between the nodes are."""
    size, reported = len(facts), {r["rank"] for r in results}
    total = size * (size + 1) / 2
    result = CheckResult("all_reduce")
    for rank in results:
        result.fault([rank], rank.get("group_fault"), _REACH)
        if rank.get("sum", total) != total:
            result.fault([rank], f"the sum is {rank['sum']}, and {total} is right", _REACH)
        result.fault([rank], rank.get("wrong_sums"), _WRONG_SUM)
    if silent := [f for f in facts if f["rank"] not in reported]:
        result.fault(silent, "ended or hung during the all_reduce", _REACH)
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
    ways: dict[tuple[str, bool], set[tuple[int, int]]] = defaultdict(set)
    for first, second, way in (link for r in results for link in r.get("links", [])):
        ways[way, hosts.get(first) == hosts.get(second)].add((first, second))
    if not ways:
        result.notes.append("NCCL's log has no line of a connection (NCCL_DEBUG_FILE)")
    texts = []
    for (way, near), pairs in sorted(ways.items()):
        first = ", ".join(f"{a}-{b}" for a, b in sorted(pairs)[:3]) + ", ..." * (len(pairs) > 3)
        text = f"{way} between {counted(len(pairs), 'pair')} of ranks ({first})"
        texts.append(text)
        if way.startswith("NET/Socket"):
            result.notes.append(f"TCP: {text}: {_TCP}")
        elif way.startswith(("NET/", "SHM")) and near:
            result.notes.append(f"{text} of a node: {_NO_PEER}")
        elif way.startswith("NET/") and not way.endswith("GDRDMA"):
            result.notes.append(f"{text} is without GPUDirect RDMA: {_NO_RDMA}")
    result.text = "; ".join(texts)
    return result


def bandwidth(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The bandwidth of an all_reduce between the nodes; a fault where it is absurd.

    Only between nodes: inside a node there is no interface that could be the wrong one.
    """
    timed = next((r for r in results if "bus_mb_per_s" in r), None)
    if timed is None:
        return CheckResult("bandwidth", "" if len(facts) > 1 else "one rank: nothing to measure")
    nodes = len(by_host(facts)) > 1
    speed, backend = timed["bus_mb_per_s"], timed["backend"]
    between = f"between {timed['members']} {'nodes' if nodes else 'ranks of a node'}"
    text = f"busbw {speed / 1e3:.3g} GB/s {between} (all_reduce of {timed['mib']:g} MiB)"
    result = CheckResult("bandwidth", text)
    expected = _MIN_NCCL_MB_PER_S if backend == "nccl" else _MIN_GLOO_MB_PER_S
    if speed < _ABSURD_MB_PER_S and nodes:
        result.fault(results, text, _REACH)
    elif speed < expected and nodes:
        result.notes.append(
            f"{speed:.0f} MB/s is slow for {backend} on this network, of which {expected:.0f} are "
            "expected at least: check the interface"
        )
    return result
