"""The device and the process group of a rank."""

import datetime
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jobkit.errors import UsageError
from jobkit.payload.place import RankEnv

T = TypeVar("T")


def pick_device(wanted: str, place: RankEnv) -> torch.device:
    """The rank's device. Two ranks of a node never share a GPU; raises UsageError instead."""
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu, or request GPUs")
    if count == 0:
        return torch.device("cpu")
    # A site may show each task its own GPU only: then it is device 0, whatever the local rank.
    if 1 < count < place.local_world_size:
        raise UsageError(
            f"{place.local_world_size} ranks on a node of {count} visible GPUs: start one rank per "
            "GPU, or use --device cpu"
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    return device


class Group:
    """The process group of a job, or the same calls for one process alone."""

    def __init__(self, place: RankEnv, device: torch.device, timeout_s: float) -> None:
        self.place, self.device = place, device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        if place.master_port:
            os.environ.setdefault("MASTER_ADDR", place.master_addr)
            os.environ.setdefault("MASTER_PORT", str(place.master_port))
            init = "env://"
        else:  # one process: a store that needs no port
            init = None
        dist.init_process_group(
            # CPU offload needs collectives on CPU tensors beside those on the GPU.
            backend="cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo",
            init_method=init,
            store=None if init else dist.HashStore(),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )

    def reduce(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        """All-reduce named numbers in double precision: how is 'sum' or 'max'."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return dict(zip(values, tensor.tolist(), strict=True))

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
