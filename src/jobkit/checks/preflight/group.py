"""What the ranks of a preflight do together: is an all_reduce right, and how fast is it?"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from jobkit.checks.preflight.facts import within
from jobkit.checks.preflight.nccl import Log, joined, keep_log, said
from jobkit.errors import UsageError
from jobkit.payload.distributed import Group, join
from jobkit.payload.place import RankEnv
from jobkit.units import bus_factor

Results = dict[str, Any]
_BUDGET_S = 1.5  # for the timed all_reduces of one size
_SIZES_MIB = {"cpu": (0.25, 2, 16), "cuda": (1, 16, 256)}
_TIMES = 5


def together(place: RankEnv, wanted: str, timeout_s: float) -> Results:
    """Return what the job's process group measured; a fault is a result as well."""

    own = "NCCL_DEBUG_FILE" not in os.environ
    log = Log(keep_log())  # before NCCL is initialised

    def work() -> Results:
        try:
            return _measure(join(wanted, place, timeout_s), log)
        except (RuntimeError, UsageError, ValueError) as error:
            lines = str(error).strip().split("\n")
            return {"group_fault": f"{type(error).__name__}: {lines[0][:300]}"}

    late = {
        "group_fault": f"not finished within {timeout_s + 3:.0f} s: a rank or the network hangs"
    }
    try:
        return within(timeout_s + 3, work, late)
    finally:
        log.remove(own)


def _measure(group: Group, log: Log) -> Results:
    """Return the sum over all ranks, the latency, and the bandwidth between nodes (or ranks)."""
    place = group.place
    total = group.reduce({"ranks": place.rank + 1}, "sum")["ranks"]
    found: Results = {
        "backend": group.backend,
        "sum": total,
        "latency_us": _latency_s(group) * 1e6,
    }
    ways = said(log.new_text(), range(place.world_size))
    found |= _bandwidth(group)
    if group.backend == "nccl":  # what was connected for the large all_reduces has other ranks
        found |= joined(ways, said(log.new_text(), _members(place)))
    group.close()
    return found


def _members(place: RankEnv) -> list[int]:
    """Return the ranks of the large all_reduces: one per node, all of them on one node."""
    leaders = list(range(0, place.world_size, place.local_world_size))
    return leaders if len(leaders) > 1 else list(range(place.world_size))


def _latency_s(group: Group) -> float:
    """Return the median seconds of an all_reduce of one number over all ranks."""
    return _seconds(group, torch.ones(1, device=group.device), 20, None)


def _bandwidth(group: Group) -> Results:
    """Return the busbw of large all_reduces over a rank per node; over all ranks on one node."""
    place = group.place
    members = _members(place)
    if len(members) == 1:
        return {}
    inner = dist.new_group(members)  # every rank must call this
    found: Results = {}
    if place.rank in members:
        for mib in _SIZES_MIB[group.device.type]:
            seconds = _seconds(
                group, torch.ones(int(mib * 2**18), device=group.device), _TIMES, inner
            )
            bus = mib * 2**20 / seconds * bus_factor("all_reduce", len(members))
            found = {"mib": mib, "members": len(members), "bus_mb_per_s": bus / 1e6}
            if seconds * 16 * (_TIMES + 1) > _BUDGET_S:  # the next size would take too long
                break
    dist.barrier()
    return found


def _seconds(group: Group, tensor: torch.Tensor, times: int, inner: Any) -> float:
    """Return the median seconds of an all_reduce, maximum over ranks: so all decide the same."""
    wait: Callable[[], Any] = (
        torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    )
    taken = []
    for _ in range(times + 1):
        wait()
        start = time.perf_counter()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=inner)
        wait()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(taken[1:])], dtype=torch.float64, device=group.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=inner)
    return float(slowest)
