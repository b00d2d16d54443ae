"""The checks of a preflight on what its ranks report: pure functions, one per check.

Each returns what was measured, and what is wrong with its fix.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobkit.checks.preflight.report import (
    CheckResult,
    Facts,
    by_host,
    counted,
    grouped,
    named_ranks,
    ranges,
    where,
)

# Where one of these found a fault, a group would only hang, or fail for a reason already reported.
NEEDED_FOR_A_GROUP = ("presence", "ranks", "world", "gpus", "master", "port")
MIN_CORES_PER_GPU = 4  # Python, autograd, NCCL's proxies, checkpoints: a thread each
_MIN_SHM_MIB = 512  # a container's default is 64; NCCL has buffers there for each pair of ranks
_SOCKETS_PER_RANK = 3  # groups of Gloo, each of which connects a rank with every other
_OTHER_FILES = 256
_ABSURD_MB_PER_S = 10.0  # less than Fast Ethernet: training would only wait
_MIN_NCCL_MB_PER_S = 5000.0  # where no rate is known: TCP over a fast network gives 1 to 3 GB/s
_MIN_GLOO_MB_PER_S = 100.0
_MIN_SHARE_OF_RATE = 0.25  # chosen, of the fastest interface's: TCP reaches a tenth of 200 Gb/s

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
_TORCH_FOR_GPU = (
    "install a torch for this driver and GPU (make LOCK= venv, with PIP_INDEX_URL of PyTorch's "
    "cu126 or cu128 wheels), or use the site's container"
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
_SHARED_FOLDER = "choose a folder on a file system of all nodes with --run-dir (or JOBKIT_LOGS)"
_FREE_PORT = (
    "end the program that holds it (ss -ltnp shows it), or set another MASTER_PORT; unset, the "
    "port comes from the job's id"
)
_PREPARE = (
    "python -m jobkit prepare --dataset {} on a login node, on a file system of all nodes, and the "
    "same --data-dir (or JOBKIT_DATA_DIR) for the job"
)
_REACH = (
    "let the nodes reach each other on all ports, and set NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME to the interface that they share; NCCL_DEBUG=INFO says more"
)
_WRONG_SUM = (
    "do not train here: try NCCL_LL128_C2C=0 (GH200 with Slingshot), then another version of NCCL, "
    "and show the site this line"
)
_FAST_INTERFACE = (
    "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the fast interface, and show the site this "
    "line"
)
_TCP = (
    "check NCCL_NET, NCCL_IB_DISABLE, NCCL_IB_HCA and, in a container, that the network's devices "
    "and NCCL's plug-in are inside; on Slingshot NCCL_NET='AWS Libfabric' (or OFI) makes it fail "
    "instead of falling back"
)
_NO_PEER = (
    "GPUs of a node copy by way of the host's memory: let each rank see all GPUs of its node "
    "(--gpu-bind=none), and check NCCL_P2P_DISABLE and ACS"
)


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
        places(facts),
        world(facts),
        gpus(facts),
        cores(facts),
        limits(facts),
        names(facts),
        port(facts[0], port_fault),
        versions(facts),
        writable(facts),
    ]


def environment(facts: Sequence[Facts]) -> CheckResult:
    """Driver, torch's CUDA and the architectures that torch was built for: shown first."""
    result = CheckResult("environment")
    shown = [f for f in facts if f.get("driver") or f.get("architectures")]
    if not shown:
        result.text = f"torch {facts[0]['versions'].get('torch', 'unknown')}, no GPU driver found"
        return result
    first = shown[0]
    built, texts = first.get("architectures", []), []
    texts.append(f"driver {first.get('driver') or 'unknown'}")
    versions_ = first["versions"]
    runtime = versions_.get("cuda") or versions_.get("hip") or first.get("torch_cuda") or "none"
    texts.append(f"torch {versions_.get('torch', 'unknown')} for CUDA {runtime}")
    texts.append(f"built for {' '.join(built) or 'unknown architectures'}")
    result.text = "; ".join(texts)
    for capability, same in grouped(shown, lambda f: f.get("capability")).items():
        if built and not any(runs_on(name, capability) for name in built):
            text = f"the GPU is {capability}, and torch was built for {' '.join(built)}"
            result.fault(where(same), text, _TORCH_FOR_GPU)
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
    stuck = [f for f in connected if f["rank"] not in reported]
    if stuck:
        text = f"connected but did not report within {waited_s:.0f} s"
        result.fault(where(stuck), text, _HUNG_NODE)
    absent = sorted(set(range(expected)) - reported - {f["rank"] for f in stuck})
    chief = facts[0]
    nodes, per_node = chief["nodes"], max(chief["local_world_size"], 1)
    homes: dict[str, list[int]] = defaultdict(list)
    for rank in absent:
        index = rank // per_node
        homes[nodes[index] if index < len(nodes) else "an unknown node"].append(rank)
    for name, ranks in homes.items():
        result.fault(
            f"{named_ranks(ranks)} on {name}",
            f"did not connect within {waited_s:.0f} s",
            f"check {name} and the error lines of these ranks (did they start? can they reach "
            f"{chief['master_addr']}?), or leave the node out with --exclude={name}",
        )
    return result


def places(facts: Sequence[Facts]) -> CheckResult:
    """Each rank is there once, and the ranks of a node follow each other."""
    hosts = by_host(facts)
    spread = [f"{name} {ranges(f['rank'] for f in same)}" for name, same in [*hosts.items()][:8]]
    text = f"each rank once; {', '.join(spread)}" + ", ..." * (len(hosts) > 8)
    result = CheckResult("ranks", text)
    for text, same in grouped(facts, lambda f: f["place_fault"]).items():
        result.fault(where(same), text, _START_WITH_SRUN)
    for rank, count in sorted(Counter(f["rank"] for f in facts).items()):
        if count > 1:
            twice = by_host([f for f in facts if f["rank"] == rank])
            nodes = ", ".join(f"{name} ({len(same)})" for name, same in [*twice.items()][:8])
            text = f"{count} processes believe that they are rank {rank}"
            result.fault(nodes, text, _START_WITH_SRUN)
    for fact in () if result.faults else facts:
        size, rank = fact["local_world_size"], fact["rank"]
        if rank % size != fact["local_rank"] or any(
            f["rank"] // size != rank // size for f in hosts[fact["host"]]
        ):
            text = f"rank is not node * {size} + local_rank (local_rank {fact['local_rank']})"
            result.fault(where([fact]), text, _BLOCK)
    return result


def world(facts: Sequence[Facts]) -> CheckResult:
    """All ranks have the same world size, and it is the number of tasks."""
    size = facts[0]["world_size"]
    result = CheckResult("world", f"world size {size} on {counted(len(by_host(facts)), 'node')}")
    if facts[0]["tasks"]:
        result.text += f", as the step's {facts[0]['tasks']} tasks"
    wrong = [f for f in facts if f["tasks"] not in (None, f["world_size"]) and not f["place_fault"]]
    for (claimed, tasks), same in grouped(wrong, lambda f: (f["world_size"], f["tasks"])).items():
        text = f"world size is {claimed} and the step has {tasks} tasks"
        result.fault(where(same), text, _WORLD_SIZE)
    sizes = grouped(facts, lambda f: f["world_size"])
    if len(sizes) > 1 and not wrong and not any(f["place_fault"] for f in facts):
        text = ", ".join(f"{size} ({where(same)})" for size, same in sizes.items())
        result.fault("all", f"ranks differ in the world size: {text}", _WORLD_SIZE)
    return result


def gpus(facts: Sequence[Facts]) -> CheckResult:
    """Each rank of a node has a GPU to itself, or no rank has one.

    Two MIG instances of one GPU have a PCI address in common, and NCCL refuses them.
    """
    result = CheckResult("gpus", "none visible: the ranks compute on their CPUs")
    for text, same in grouped(facts, lambda f: f.get("gpu_fault")).items():
        fix = _TORCH_FOR_GPU if "driver" in text else _GPU_PER_RANK
        result.fault(where(same), text, fix)
    with_gpu = [f for f in facts if f["gpus"]]
    if 0 < len(with_gpu) < len(facts) and not result.faults:
        without = [f for f in facts if not f["gpus"]]
        result.fault(where(without), "no GPU is visible, and other ranks have one", _GPU_PER_RANK)
    for key in ("gpu", "gpu_bus"):
        same_gpu = grouped(with_gpu, lambda f, key=key: f.get(key) and (f["host"], f[key]))  # type: ignore[misc]
        for (host, gpu), same in same_gpu.items():
            if len(same) > 1 and not result.faults:
                text = f"{len(same)} ranks are on one GPU, {gpu} (host {host})"
                result.fault(where(same), text, _GPU_PER_RANK)
    if with_gpu:
        kinds = Counter(f.get("gpu_name", "unknown") for f in with_gpu)
        result.text = f"one per rank, none shared: {', '.join(sorted(kinds))}"
        if len(kinds) > 1:
            result.note(f"mixed GPU models, the slowest limits all: {dict(kinds)}")
    return result


def cores(facts: Sequence[Facts]) -> CheckResult:
    """No rank is bound to another's cores, to fewer than it has threads, or far from its GPU."""
    result, texts = CheckResult("cores"), []
    for host, same in by_host(facts).items():
        sets = {frozenset(f["cores"]) for f in same}
        total, least = frozenset.union(*sets), min(map(len, sets))
        machine = same[0]["machine_cores"]
        if len(same) > 1 and len(sets) == 1 and least < len(same) and len(total) < machine:
            text = f"all share {counted(least, 'core')} ({ranges(total)}) of {machine}"
            result.fault(where(same), text, _BIND_CORES)
        elif len(sets) > 1 and sum(map(len, sets)) > len(total):
            pairs = ", ".join(f"rank {f['rank']}: {ranges(f['cores'])}" for f in same[:4])
            result.fault(where(same), f"bound to cores that overlap ({pairs})", _BIND_CORES)
        if (threads := sum(f["threads"] for f in same)) > len(total):
            of = f"{threads} threads of {len(same)} ranks"
            result.note(f"{host} has {len(total)} for {of}: cores oversubscribed")
        if same[0]["gpus"] and len(total) < MIN_CORES_PER_GPU * len(same):
            result.note(
                f"{host} has {counted(len(total), 'core')} for {counted(len(same), 'GPU')}, which "
                f"then wait for the host: ask for --cpus-per-task={MIN_CORES_PER_GPU} or more"
            )
        shared = f", shared by {len(same)} ranks" if len(sets) < len(same) else " per rank"
        texts.append(f"{host} {least} of {machine} cores{shared}")
    result.text = "; ".join(texts[:4]) + "; ..." * (len(texts) > 4)
    few = [f for f in facts if len(f["cores"]) < f["threads"]]
    for (threads, count), same in grouped(few, lambda f: (f["threads"], len(f["cores"]))).items():
        text = f"{threads} threads on {counted(count, 'core')}"
        result.fault(where(same), text, f"OMP_NUM_THREADS={count}, or more --cpus-per-task")
    far = [f for f in facts if f.get("gpu_cores") and not {*f["cores"]} & {*f["gpu_cores"]}]
    if far:
        result.note(
            f"{where(far)}: bound to cores of another socket than the GPU's: srun --cpu-bind, or "
            "--gpu-bind=closest"
        )
    return result


def limits(facts: Sequence[Facts]) -> CheckResult:
    """Limits of the processes that a training of this size runs into, as notes."""
    result = CheckResult("limits", "open files, shared and locked memory")
    needed = _SOCKETS_PER_RANK * len(facts) + _OTHER_FILES
    on_gpus = [f for f in facts if f["gpus"]]
    if few := [f for f in facts if 0 <= f.get("open_files", -1) < needed]:
        result.note(
            f"{where(few)}: {min(f['open_files'] for f in few)} open files, and {len(facts)} ranks "
            f"need about {needed} each: ulimit -n"
        )
    several = [f for f in on_gpus if f["local_world_size"] > 1]
    if small := [f for f in several if 0 <= f.get("shm_mib", -1) < _MIN_SHM_MIB]:
        result.note(
            f"{where(small)}: {min(f['shm_mib'] for f in small)} MiB free in /dev/shm, where NCCL "
            "exchanges between ranks of a node: give the container more (docker: --shm-size, "
            "--ipc=host)"
        )
    locked = [f for f in on_gpus if f.get("memlock_mib", -1) >= 0]
    if locked and len(facts[0]["nodes"]) > 1:
        result.note(
            f"{where(locked)}: locked memory is limited to {locked[0]['memlock_mib']} MiB, which "
            "RDMA needs unlimited: ulimit -l, or the container's --ulimit memlock=-1"
        )
    return result


def names(facts: Sequence[Facts]) -> CheckResult:
    """The master's name, and each node's own, resolve to what others can reach."""
    chief, hosts = facts[0], len(by_host(facts))
    name, number = chief["master_addr"], chief["master_port"]
    address = f"{name}:{number}" if number else name
    text = f"{address} is {', '.join(chief['master_ips'][:2])}, reached from "
    result = CheckResult("master", text + counted(hosts, "node"))
    nodes = max(hosts, len(chief["nodes"]))
    # Nodes that are simulated on one machine do reach each other at its loopback.
    if nodes == 1 or (len({f["machine"] for f in facts}) == 1 and hosts == nodes):
        return result
    loops = grouped(facts, lambda f: next(iter(_loopback(f["master_ips"])), ""))
    for ip, same in loops.items():
        text = f"the master's name {name} resolves to {ip} between nodes"
        result.fault(where(same), text, _MASTER_NAME)
    for fact in () if result.faults else facts:
        loop = _loopback(fact["own_ips"])
        if not fact["interface"] and (loop or not fact["own_ips"]):
            text = f"resolves to {loop[0]}" if loop else "does not resolve"
            text = f"its own name {fact['hostname']} {text}: Gloo would offer that to other nodes"
            result.fault(where([fact]), text, _OWN_NAME)
    return result


def _loopback(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses at which a machine reaches only itself."""
    return [a for a in addresses if ipaddress.ip_address(a.split("%")[0]).is_loopback]


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
    commit = next((f["commit"] for f in facts if f.get("commit")), "none")
    text = ", ".join(f"{name} {value}" for name, value in facts[0]["versions"].items())
    result = CheckResult("versions", f"{text}, commit {commit[:12]}")
    for name in sorted({name for f in facts for name in f["versions"]}):
        values = grouped(facts, lambda f, name=name: f["versions"].get(name, "none"))  # type: ignore[misc]
        usual = max(values, key=lambda value: len(values[value]))
        for value, same in values.items():
            if value != usual:
                text = f"{name} is {value}, and {usual} on the other ranks"
                result.fault(where(same), text, _SAME_CODE)
    return result


def writable(facts: Sequence[Facts]) -> CheckResult:
    """Each node can write to the run's folder."""
    nodes = counted(len(by_host(facts)), "node")
    result = CheckResult("logs", f"{facts[0]['log_dir']} is writable from {nodes}")
    for text, same in grouped(facts, lambda f: f["log_fault"]).items():
        text = f"{same[0]['log_dir']} cannot be written: {text}"
        result.fault(where(same), text, _SHARED_FOLDER)
    return result


# --- what the ranks did together ------------------------------------------------------------------


def judge_together(
    facts: Sequence[Facts], results: Sequence[Facts], task: Mapping[str, Any]
) -> list[CheckResult]:
    """All checks of what the ranks did together, given the coordinator's task."""
    checks = [shared(facts, results, task["log_dir"]), data(facts, results)]
    if not task["group"]:
        skipped = CheckResult("all_reduce")
        skipped.note("not checked, nor the bandwidth, because of the faults above")
        return [*checks, skipped]
    return [
        *checks,
        all_reduce(facts, results),
        transports(facts, results),
        bandwidth(facts, results),
    ]


def shared(facts: Sequence[Facts], results: Sequence[Facts], folder: str) -> CheckResult:
    """A file that one node wrote to the run's folder is there on every node."""
    result = CheckResult("shared")
    if not folder:
        result.note("not checked, as no file could be written")
        return result
    result.text = f"{folder} is the same folder on {counted(len(by_host(facts)), 'node')}"
    if blind := [r for r in results if folder in r["hidden"]]:
        text = f"{folder} is another folder here: a file that the master's node wrote is not there"
        result.fault(where(blind), text, _SHARED_FOLDER)
    return result


def data(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The cache is complete on every node, or rank 0 can make it for all."""
    result = CheckResult("data")
    chief = next((f for f in facts if "dataset" in f), None)
    if chief is None:
        result.note("not checked: rank 0 did not report")
        return result
    name, folder = chief["dataset"], chief["data_dir"]
    prepare = _PREPARE.format(name)
    nodes = counted(len(by_host(facts)), "node")
    result.text = f"{name}: {chief.get('cache')} complete on {nodes}"
    if chief["data_fault"]:
        result.fault(where([chief]), chief["data_fault"], prepare)
    elif not chief["cached"]:
        result.text = f"{name}: not prepared yet; rank 0 makes it in {folder}, seen by all nodes"
        blind = [r for r in results if folder in r["hidden"]]
        if chief["data_dir_fault"]:
            text = f"{folder} cannot be written: {chief['data_dir_fault']}"
            result.fault(where([chief]), text, prepare)
        elif blind:
            text = f"{folder} is not the one of rank 0, which will prepare {name} there"
            result.fault(where(blind), text, prepare)
    for text, same in grouped(results, lambda r: r["cache_fault"]).items():
        result.fault(where(same), f"{chief['cache']} cannot be used: {text}", prepare)
    return result


def all_reduce(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The sum over all ranks is right on every rank, and large sums between the nodes are."""
    size = len(facts)
    total = size * (size + 1) / 2
    result = CheckResult("all_reduce")
    for text, same in grouped(results, lambda r: r.get("group_fault")).items():
        result.fault(where(same), text, _REACH)
    silent = {f["rank"] for f in facts} - {r["rank"] for r in results}
    if silent:
        lost = [f for f in facts if f["rank"] in silent]
        result.fault(where(lost), "ended or hung during the all_reduce", _REACH)
    for value, same in grouped(results, lambda r: r.get("sum")).items():
        if value != total:
            result.fault(where(same), f"the sum is {value}, and {total} is right", _REACH)
    for text, same in grouped(results, lambda r: r.get("wrong_sums")).items():
        result.fault(where(same), text, _WRONG_SUM)
    if not result.faults:
        latency = f"{results[0]['latency_us']:.0f} us"
        ranks = counted(size, "rank")
        result.text = f"right over {ranks} with {results[0]['backend']}; latency {latency}"
    return result


def bandwidth(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """The bandwidth of an all_reduce between the nodes; a fault where it is absurd.

    Only between nodes: inside a node there is no interface that could be the wrong one.
    """
    timed = next((r for r in results if "bus_mb_per_s" in r), None)
    if timed is None:
        return CheckResult("bandwidth", "" if len(facts) > 1 else "one rank: nothing to measure")
    nodes = len(by_host(facts)) > 1
    speed, backend = timed["bus_mb_per_s"], timed.get("backend", "")
    between = f"between {timed['members']} {'nodes' if nodes else 'ranks of a node'}"
    text = f"busbw {speed / 1e3:.3g} GB/s {between} (all_reduce of {timed['mib']:g} MiB)"
    result = CheckResult("bandwidth", text)
    expected = min_mb_per_s(facts, backend) if nodes else 0.0
    if speed < _ABSURD_MB_PER_S and nodes:
        result.fault(where(results), text, _FAST_INTERFACE)
    elif speed < expected:
        result.note(
            f"{speed:.0f} MB/s is slow for {backend} on this network, of which {expected:.0f} are "
            "expected at least: check the interface"
        )
    return result


def min_mb_per_s(facts: Sequence[Facts], backend: str) -> float:
    """The busbw between nodes below which a network is slow for a backend.

    On NCCL a share of the rate of each node's fastest interface, the least over the nodes.
    """
    if backend != "nccl":
        return _MIN_GLOO_MB_PER_S if backend == "gloo" else 0.0
    rates = [max(f["nics"].values()) for f in facts if f.get("nics")]
    return min(rates) / 8 * 1000 * _MIN_SHARE_OF_RATE if rates else _MIN_NCCL_MB_PER_S


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
        result.note("NCCL's log has no line of a connection (NCCL_DEBUG_FILE)")
    result.text = "; ".join(f"{way} between {_pairs(ways[way])}" for way in sorted(ways))
    fast = sorted({name for f in facts for name in f.get("nics", {})})
    for way, pairs in sorted(ways.items()):
        near = {pair for pair in pairs if hosts.get(pair[0]) == hosts.get(pair[1])}
        if way.startswith("NET/Socket"):
            there = f", and there are {', '.join(fast[:4])}" if fast else ""
            result.note(f"NCCL uses TCP ({way}) between {_pairs(pairs)}{there}: {_TCP}")
        elif way.startswith(("NET/", "SHM")) and near:
            result.note(f"{way} between {_pairs(near)} of a node: {_NO_PEER}")
        elif way.startswith("NET/") and not way.endswith("GDRDMA"):
            result.note(
                f"{way} between {_pairs(pairs)} is without GPUDirect RDMA: it copies by way of the "
                "host's memory (nvidia_peermem or dma-buf is missing)"
            )
    return result


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    numbers = sorted(pairs)
    first = ", ".join(f"{a}-{b}" for a, b in numbers[:3]) + ", ..." * (len(numbers) > 3)
    return f"{counted(len(numbers), 'pair')} of ranks ({first})"
