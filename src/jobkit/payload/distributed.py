"""The device and the process group of a rank.

A rank alone cannot choose its device: two ranks that see one GPU would both take it, which NCCL
refuses, and on a node whose GPU has failed "auto" would take the CPU while all others wait in NCCL.
So the ranks compare what they see over Gloo, before any of them makes a group of NCCL.
"""

import contextlib
import datetime
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jobkit.errors import UsageError
from jobkit.payload.place import RankEnv
from jobkit.program import process

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """The GPU that a rank would compute on, as the rank sees it alone."""

    host: str  # for people
    machine: str  # the same for processes of one machine, whatever its name
    visible: int = 0  # GPUs
    index: int = 0
    uuid: str = ""
    bus: str = ""  # PCI address, as in /sys/bus/pci; empty: not known
    name: str = ""
    fault: str = ""  # why the GPU cannot be used


def candidate(wanted: str, place: RankEnv) -> Candidate:
    """Return the GPU for this rank: by local rank of those visible, which may be its own only."""
    host, machine = process.host_name(os.environ), socket.gethostname()
    with contextlib.suppress(OSError):  # two containers may have one name, one kernel two names
        machine += Path("/proc/sys/kernel/random/boot_id").read_text()
    try:
        count = torch.cuda.device_count() if wanted != "cpu" else 0
        if count == 0:
            return Candidate(host, machine)
        index = place.local_rank % count
        gpu = torch.cuda.get_device_properties(index)
    except Exception as error:  # of a driver, of MIG, or of a GPU that fails: of several kinds
        return Candidate(host, machine, fault=str(error).strip().split("\n")[0][:300])
    uuid = str(getattr(gpu, "uuid", ""))
    at = [getattr(gpu, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    bus = "" if -1 in at else f"{at[0]:04x}:{at[1]:02x}:{at[2]:02x}.0"
    return Candidate(host, machine, count, index, uuid, bus, gpu.name)


def agreed(candidates: Sequence[Candidate], wanted: str, on_slurm: bool) -> tuple[str, str]:
    """The device type for all ranks, given each rank's candidate, and a warning or "".

    Off Slurm, "auto" takes the CPU where ranks would share a GPU. Raises UsageError, which names
    the ranks, where GPUs are shared otherwise, are defective, or are visible to some ranks only.
    """

    def named(ranks: Sequence[int]) -> str:
        texts = [f"rank {rank} on {candidates[rank].host}" for rank in ranks[:8]]
        return ", ".join(texts) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

    if faulty := [rank for rank, gpu in enumerate(candidates) if gpu.fault]:
        fault = candidates[faulty[0]].fault
        fix = "check nvidia-smi or rocm-smi there, leave the node out with --exclude"
        if "driver" in fault and ("old" in fault or "insufficient" in fault):
            fix = (
                "install a torch for that driver (make LOCK= venv with the PIP_INDEX_URL that "
                "pytorch.org/get-started says for CUDA 12.6), run in a container"
            )
        raise UsageError(
            f"{named(faulty)}: the GPU cannot be used ({fault}); {fix}, or use --device cpu"
        )
    without = [rank for rank, gpu in enumerate(candidates) if not gpu.visible]
    if len(without) == len(candidates):
        if wanted == "cuda":
            raise UsageError(
                "--device cuda: no GPU is visible here; use --device cpu, or request GPUs"
            )
        return "cpu", ""
    if without:
        raise UsageError(
            f"{named(without)}: no GPU is visible there, and the other ranks see one; "
            "request one GPU per rank on every node, or use --device cpu"
        )
    # NCCL compares host and PCI address: two instances of a partitioned GPU (MIG) are one to it.
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, gpu in enumerate(candidates):
        if gpu.bus or gpu.uuid:
            ranks_of[(gpu.machine, gpu.bus) if gpu.bus else ("", gpu.uuid)].append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), [])
    if not shared:
        return "cuda", ""
    first = candidates[shared[0]]
    if wanted == "auto" and not on_slurm:
        ranks = sum(gpu.machine == first.machine for gpu in candidates)
        gpus = f"{first.visible} GPU{'s' * (first.visible > 1)}"
        return "cpu", f"{gpus} for {ranks} ranks: all ranks compute on the CPU"
    raise UsageError(
        f"{named(shared)} would share one GPU ({first.uuid or first.bus}; visible there: "
        f"{first.visible}): start one rank per GPU, or use --device cpu"
    )


def join(
    wanted: str, place: RankEnv, timeout_s: float, warn: Callable[[str], None] = lambda _: None
) -> "Group":
    """Return the group of all ranks, each on its device; wanted: auto, cpu or cuda.

    warn: of rank 0's. Raises UsageError, on every rank, where the ranks' GPUs cannot be used.
    """
    store = meet(place, timeout_s)
    group = Group(place, torch.device("cpu"), timeout_s, store)
    gpus = group.gather(candidate(wanted, place))
    kind, warning = agreed(gpus, wanted, on_slurm=place.job_id is not None)
    if warning:
        process.on_cpu = True  # though CUDA was asked for the GPUs
        warn(warning)
    if kind == "cpu":
        return group
    device = torch.device("cuda", gpus[place.rank].index)
    torch.cuda.set_device(device)
    group.close()
    return Group(place, device, timeout_s, dist.PrefixStore("on GPUs", store))


def meet(place: RankEnv, timeout_s: float) -> dist.Store:
    """Return the store at which all ranks meet; for one process, a store that needs no port."""
    if not place.master_port:
        return dist.HashStore()
    os.environ.setdefault("MASTER_ADDR", place.master_addr)
    os.environ.setdefault("MASTER_PORT", str(place.master_port))
    timeout = datetime.timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


class Group:
    """The process group of a job, or the same calls for one process alone."""

    def __init__(
        self,
        place: RankEnv,
        device: torch.device,
        timeout_s: float,
        store: dist.Store | None = None,
    ) -> None:
        """store: at which the ranks have met already; without one they meet here."""
        self.place, self.device = place, device
        self.timeout = datetime.timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        self.backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(
            # CPU offload needs collectives on CPU tensors beside those on the GPU.
            backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo",
            store=dist.PrefixStore("default_pg", store or meet(place, timeout_s)),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self.timeout,
            device_id=device if on_gpu else None,
        )

    def reduce(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        """All-reduce named numbers in double precision: how is 'sum' or 'max'."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return dict(zip(values, tensor.tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        return gather(value)

    def on_cpu(self) -> dist.ProcessGroup:
        """A new Gloo group of all ranks, for collectives beside those of the training."""
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return group

    def close(self) -> None:
        """Tear the group down; only after success, as a failing rank must not wait for others."""
        dist.destroy_process_group()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank; group: of all ranks, if another.

    A process without a group has its own.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_or_raise(
    act: Callable[[], T],
    catch: type[Exception],
    group: dist.ProcessGroup | None = None,
    describe: Callable[[Exception], str] = str,
) -> T:
    """What act gives on this rank; where one rank raises, every rank raises.

    So no rank waits for one that failed. catch: the error that act may raise, and that is raised,
    with the text that describe gives it.
    """
    fault = None
    try:
        result = act()
    except catch as error:
        fault = describe(error)
    for text in gather(fault, group):
        if text is not None:
            raise catch(text)
    return result


def check_identity(group: Group, run_id: str, attempt: int) -> None:
    """Raise RuntimeError where ranks of another job have joined this group."""
    place = group.place
    mine = (place.job_id, place.restart, run_id, attempt)
    for rank, theirs in enumerate(group.gather(mine)):
        if theirs != mine:
            raise RuntimeError(
                f"rank {rank} belongs to another job or run: (job, restart, run, attempt) is "
                f"{theirs}, on rank {place.rank} {mine}; two jobs share {place.master_addr}:"
                f"{place.master_port}; set another MASTER_PORT"
            )


def banner(group: Group, threads: int) -> list[str]:
    """Lines that say who takes part: one of the group, one for each rank."""
    place, device = group.place, group.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    host = process.host_name(os.environ)
    mine = f"host {host}, local_rank {place.local_rank}, {name}, {threads} threads"
    master = f"{place.master_addr}:{place.master_port}" if place.master_port else "none"
    world, nodes = place.world_size, place.nodes
    head = f"backend {group.backend}, {world} process{'es' * (world > 1)}"
    head += f" on {nodes} node{'s' * (nodes > 1)}, master {master}"
    return [head, *(f"[Rank {rank}] {text}" for rank, text in enumerate(group.gather(mine)))]
