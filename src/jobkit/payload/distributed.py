"""The device and the process group of a rank."""

import datetime
import math
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jobkit.payload.devices import agree_device
from jobkit.payload.place import RankEnv
from jobkit.payload.readback import read_back

T = TypeVar("T")
_LEAST_HEARTBEAT_S = 60  # a call of CUDA may hold NCCL's watchdog for some seconds
_MOST_DUMP_S = 15.0  # torch's default
_DUMPS = 4  # times that torch waits for a dump before it raises


def follow_timeout(timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's own limits around NCCL follow the timeout of a collective.

    From torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: a thread looks every HEARTBEAT_TIMEOUT
    (8 minutes) whether NCCL's watchdog has moved, and otherwise aborts the process as much later;
    it waits as long after another rank's timeout. So healthy ranks would end before a longer
    timeout, and stay long after a shorter one. A rank whose collective timed out waits four times
    WAIT_TIMEOUT_DUMP before it raises: a tenth of the timeout here, at most. To be called before
    the group is made; what the user has set stays.
    """
    heartbeat_s = max(_LEAST_HEARTBEAT_S, math.ceil(timeout_s))
    dump_s = min(_MOST_DUMP_S, timeout_s / 10 / _DUMPS)
    environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(heartbeat_s))
    environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(math.ceil(dump_s * 1000)))


def join(
    wanted: str, place: RankEnv, timeout_s: float, warn: Callable[[str], None] = lambda _: None
) -> "Group":
    """Return the group of all ranks, each on its device; wanted: auto, cpu or cuda.

    Raises UsageError, on every rank, where the ranks' GPUs cannot be used.
    """
    store = meet(place, timeout_s)
    return Group(place, agree_device(wanted, place, store, warn), timeout_s, store)


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
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        if self.backend == "nccl":
            follow_timeout(timeout_s)
        dist.init_process_group(
            # CPU offload needs collectives on CPU tensors beside those on the GPU.
            backend="cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("default_pg", store or meet(place, timeout_s)),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )

    def reduce(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        """All-reduce named numbers in double precision: how is 'sum' or 'max'."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return dict(zip(values, read_back(tensor), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value)
        return values

    def on_cpu(self) -> dist.ProcessGroup:
        """A new Gloo group of all ranks, for collectives beside those of the training."""
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return group

    def close(self) -> None:
        """Tear the group down; only after success, as a failing rank must not wait for others."""
        dist.destroy_process_group()


def all_or_raise(
    gather: Callable[[Any], list[Any]],
    act: Callable[[], T],
    catch: type[Exception],
    describe: Callable[[Exception], str] = str,
) -> list[T]:
    """Every rank's result of act, in rank order; where one rank raises, every rank raises.

    So no rank waits for one that failed. gather: gives every rank's value to every rank. catch: the
    error that act may raise, and that is raised, with the text that describe gives it.
    """
    result, fault = None, None
    try:
        result = act()
    except catch as error:
        fault = describe(error)
    answers = gather((result, fault))
    for _, fault in answers:
        if fault is not None:
            raise catch(fault)
    return [answer for answer, _ in answers]


def check_identity(group: Group, run_id: str, attempt: int) -> None:
    """Raise RuntimeError where ranks of another job have joined this group."""
    place = group.place
    own = (place.job_id, place.restart, run_id, attempt)
    for rank, other in enumerate(group.gather(own)):
        if other != own:
            raise RuntimeError(
                f"rank {rank} belongs to another job or run: (job, restart, run, attempt) is "
                f"{other}, on rank {place.rank} {own}; two jobs share {place.master_addr}:"
                f"{place.master_port}; set another MASTER_PORT"
            )


def banner(group: Group, threads: int) -> list[str]:
    """Lines that say who takes part: one of the group, one for each rank."""
    place, device = group.place, group.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    # On a Slurm of several nodes on one machine only this name tells them apart.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = f"host {host}, local_rank {place.local_rank}, {name}, {threads} threads"
    lines = [f"[Rank {rank}] {text}" for rank, text in enumerate(group.gather(own))]
    master = f"{place.master_addr}:{place.master_port}" if place.master_port else "none"
    world, nodes = place.world_size, place.nodes
    head = f"backend {group.backend}, {world} process{'es' * (world > 1)}"
    head += f" on {nodes} node{'s' * (nodes > 1)}"
    return [f"{head}, master {master}", *lines]
