"""What the ranks of a preflight do together: is an all_reduce right, how fast, and by which way?"""

import os
import re
import shutil
import socket
import statistics
import tempfile
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobkit.errors import UsageError
from jobkit.files import MAX_TEXT, open_regular
from jobkit.payload.distributed import Group, join
from jobkit.payload.place import RankEnv
from jobkit.program.process import synchronised_s
from jobkit.units import bus_factor

Results = dict[str, Any]
_BUDGET_S = 1.5  # for the timed all_reduces of one size
_SIZES_MIB = {"cpu": (0.25, 2, 16), "cuda": (1, 16, 256)}
_TIMES = 5
_SUMMED_BYTES, _SUMS = (1 << 16, 1 << 20, 1 << 24), 20
_MAX_LINKS = 64  # of one rank in its message: rings and trees have a few
_VIA = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (\S.*)"
)


def together(place: RankEnv, wanted: str, timeout_s: float) -> Results:
    """Return what the job's process group measured; a fault is a result as well."""
    is_ours = "NCCL_DEBUG_FILE" not in os.environ
    log = keep_log()  # before NCCL is initialised
    try:
        return _measure(join(wanted, place, timeout_s), log, timedelta(seconds=timeout_s))
    except (RuntimeError, UsageError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        return {"group_fault": text.splitlines()[0][:300]}
    finally:
        if is_ours:
            shutil.rmtree(log.parent, ignore_errors=True)


def _measure(group: Group, log: Path, timeout: timedelta) -> Results:
    """Return the sum over all ranks, the latency, and the bandwidth between nodes (or ranks)."""
    place, device = group.place, group.device
    total = group.reduce({"ranks": place.rank + 1}, "sum")["ranks"]
    latency_s = _seconds(torch.ones(1, device=device), 20, None)
    results: Results = {"backend": group.backend, "sum": total, "latency_us": latency_s * 1e6}
    if group.backend == "nccl":  # before another group writes ranks of its own into the log
        results["links"] = links(read_log(log))[:_MAX_LINKS]
    # One rank per node; all of them on one node.
    leaders = list(range(0, place.world_size, place.local_world_size))
    members = leaders if len(leaders) > 1 else list(range(place.world_size))
    if len(members) > 1:
        inner = dist.new_group(members, timeout=timeout)  # every rank must call this
        for mib in _SIZES_MIB[device.type] if place.rank in members else ():
            seconds = _seconds(torch.ones(int(mib * 2**18), device=device), _TIMES, inner)
            bus = mib * 2**20 / seconds * bus_factor("all_reduce", len(members))
            results |= {"mib": mib, "members": len(members), "bus_mb_per_s": bus / 1e6}
            if seconds * 16 * (_TIMES + 1) > _BUDGET_S:  # the next size would take too long
                break
        if place.rank in members:
            results["wrong_sums"] = wrong_sums(device, members.index(place.rank), inner)
        dist.barrier()
    group.close()
    return results


def wrong_sums(device: torch.device, index: int, inner: Any) -> str:
    """Return which sums between the members are wrong; empty where all are right.

    Small whole numbers, whose sum is exact in every order, at the sizes of NCCL's protocols: known
    faults add wrongly in some of the calls only (https://github.com/NVIDIA/nccl/issues/2001).
    """
    count = dist.get_world_size(inner)
    for size in _SUMMED_BYTES:
        places = torch.arange(size // 4, device=device) % 1024
        right = count * places.float() + count * (count - 1) / 2
        wrong = torch.zeros(1, device=device)
        for _ in range(_SUMS):
            tensor = places.float() + index
            dist.all_reduce(tensor, group=inner)
            wrong += (tensor != right).any()
        if bad := int(wrong):  # the only time that the host waits
            return f"{bad} of {_SUMS} sums of {size // 1024} KiB between the nodes are wrong"
    return ""


def _seconds(tensor: torch.Tensor, times: int, inner: Any) -> float:
    """Return the median seconds of an all_reduce, maximum over ranks: so all decide the same."""
    taken = []
    for _ in range(times + 1):
        start = synchronised_s()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=inner)
        taken.append(synchronised_s() - start)
    slowest = tensor.new_tensor([statistics.median(taken[1:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=inner)
    return float(slowest)


# --- what NCCL itself says of the ways between the ranks ------------------------------------------


def keep_log(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Have NCCL write what it connects into a file of this process; return the file.

    To be called before NCCL is initialised. A file that the user named is kept as it is, with
    their level. NCCL replaces %h and %p by host and process. The lines are those of level INFO
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug); RCCL has the
    same.
    """
    if "NCCL_DEBUG_FILE" not in environ:
        folder = tempfile.mkdtemp(prefix="jobkit-preflight-")
        environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl-%h-%p.log")
        environ.pop("NCCL_DEBUG_SUBSYS", None)  # its default has what is read here
    name = environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
    return Path(name.replace("%h", socket.gethostname().split(".")[0]))


def read_log(path: Path) -> str:
    """Return the log of this process; nothing if it is unreadable."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_TEXT).decode(errors="replace")
    except OSError:
        return ""


def links(text: str) -> list[tuple[int, int, str]]:
    """Return the links in a log, each once: two ranks and the way, as NET/IB GDRDMA, P2P/CUMEM.

    GDRDMA: the network reads the GPU's memory.
    """
    pairs: dict[tuple[int, int, str], None] = {}
    for match in _VIA.finditer(text):
        first, second = sorted(int(number) for number in match.group(1, 2))
        parts = match[3].strip().split("/")
        way = "SHM" if parts[0] == "SHM" else "/".join(parts[:2])
        way += " GDRDMA" if "GDRDMA" in parts else ""
        pairs[first, second, way] = None
    return list(pairs)
