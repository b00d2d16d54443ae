"""The device of each rank, agreed by all ranks before they make a process group.

A rank alone cannot decide it: two ranks that see one GPU would both take it, which NCCL refuses,
and on a node whose GPU has failed "auto" would take the CPU while all others wait in NCCL.
"""

import contextlib
import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jobkit.errors import UsageError
from jobkit.payload.place import RankEnv

_MAY_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"  # a user's explicit choice; recent NCCL allows it
_LAST_READ = timedelta(seconds=10)  # for the ranks to read why they must end


@dataclass(frozen=True)
class Candidate:
    """The GPU that a rank would compute on, as the rank finds it alone."""

    host: str  # for people
    machine: str  # the same for processes of one machine, whatever its name
    visible: int = 0  # GPUs
    index: int = 0
    uuid: str = ""
    bus: str = ""  # PCI address, for where there is no UUID
    name: str = ""
    fault: str = ""  # why the GPU cannot be used


def candidate(wanted: str, place: RankEnv) -> Candidate:
    """Return the GPU for this rank: by local rank of those visible, which may be its own only."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    machine = _machine()
    try:
        count = torch.cuda.device_count() if wanted != "cpu" else 0
        if count == 0:
            return Candidate(host, machine)
        index = place.local_rank % count
        found = torch.cuda.get_device_properties(index)
    except RuntimeError as error:  # the driver does not fit, or the GPU is defective
        return Candidate(host, machine, fault=str(error).strip().split("\n")[0][:300])
    uuid, bus = str(getattr(found, "uuid", "")), pci_address(found)
    return Candidate(host, machine, count, index, uuid, bus, found.name)


def pci_address(properties: object) -> str:
    """The PCI address in torch's properties of a GPU, as in /sys/bus/pci; empty: not known."""
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return "" if -1 in parts else f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}.0"


def _machine() -> str:
    """Host name and boot: two containers may have the same name, and one kernel two names."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot}"
    return socket.gethostname()


@dataclass(frozen=True)
class Agreed:
    """The type of device that all ranks take, and a warning about it."""

    type: str
    warning: str = ""


def agreed(found: Sequence[Candidate], wanted: str, on_slurm: bool) -> Agreed:
    """Return the device type for all ranks, given every rank's candidate in rank order.

    Off Slurm, "auto" takes the CPU where ranks would share a GPU. Raises UsageError, which names
    the ranks, where GPUs are shared otherwise, are defective, or are visible to some ranks only.
    """
    if faulty := [rank for rank, one in enumerate(found) if one.fault]:
        fault = found[faulty[0]].fault
        raise UsageError(
            f"{_named(faulty, found)}: the GPU cannot be used ({fault}); check nvidia-smi or "
            "rocm-smi there, leave the node out with --exclude, or use --device cpu"
        )
    without = [rank for rank, one in enumerate(found) if not one.visible]
    if len(without) == len(found):
        if wanted == "cuda":
            raise UsageError(
                "--device cuda: no GPU is visible here; use --device cpu, or request GPUs"
            )
        return Agreed("cpu")
    if without:
        raise UsageError(
            f"{_named(without, found)}: no GPU is visible there, and the other ranks see one; "
            "request one GPU per rank on every node, or use --device cpu"
        )
    shared = _shared(found)
    if not shared or os.environ.get(_MAY_SHARE) == "1":
        return Agreed("cuda")
    first = found[shared[0]]
    if wanted == "auto" and not on_slurm:
        ranks = sum(one.machine == first.machine for one in found)
        many = "s" * (first.visible > 1)
        return Agreed(
            "cpu", f"{first.visible} GPU{many} for {ranks} ranks: all ranks compute on the CPU"
        )
    raise UsageError(
        f"{_named(shared, found)} would share one GPU ({first.uuid or first.bus}; visible there: "
        f"{first.visible}): start one rank per GPU, or use --device cpu"
    )


def _shared(found: Sequence[Candidate]) -> list[int]:
    """The ranks of the first GPU that several of them would take; none where no GPU is shared."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, one in enumerate(found):
        # The instances of a partitioned GPU (MIG) have UUIDs of their own, and one address.
        if key := one.uuid or one.bus:
            ranks["" if one.uuid else one.machine, key].append(rank)
    return next((same for same in ranks.values() if len(same) > 1), [])


def _named(ranks: Sequence[int], found: Sequence[Candidate]) -> str:
    """Ranks with their hosts: 'rank 0 on n1, rank 1 on n1'."""
    texts = [f"rank {rank} on {found[rank].host}" for rank in ranks[:8]]
    return ", ".join(texts) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def agree_device(
    wanted: str, place: RankEnv, store: dist.Store | None, warn: Callable[[str], None]
) -> torch.device:
    """Return this rank's device, after all ranks have compared theirs; warn is rank 0's to call.

    store: of all ranks; None for one process alone. Raises UsageError on every rank.
    """
    own = candidate(wanted, place)
    on_slurm = place.job_id is not None
    if store is None or place.world_size == 1:
        result = agreed([own], wanted, on_slurm)
    else:
        result = _exchanged(wanted, place, own, dist.PrefixStore("device", store), on_slurm)
    if result.warning:
        warn(result.warning)
    if result.type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", own.index)
    torch.cuda.set_device(device)
    return device


def _exchanged(
    wanted: str, place: RankEnv, own: Candidate, store: dist.Store, on_slurm: bool
) -> Agreed:
    """What rank 0 concludes from every rank's candidate; all ranks get the same answer."""
    store.set(f"rank {place.rank}", json.dumps(asdict(own)))
    if place.rank == 0:
        texts = store.multi_get([f"rank {rank}" for rank in range(place.world_size)])
        try:
            verdict = asdict(agreed([Candidate(**json.loads(t)) for t in texts], wanted, on_slurm))
        except UsageError as error:
            verdict = {"fault": str(error)}
        store.set("agreed", json.dumps(verdict))
    verdict = json.loads(store.get("agreed"))
    if "fault" not in verdict:
        return Agreed(**verdict)
    # Rank 0 may serve the store: it stays until the others know as well.
    if store.add("read", 1) == place.world_size:
        store.set("all read", "")
    with contextlib.suppress(RuntimeError):
        store.wait(["all read"], _LAST_READ)
    raise UsageError(verdict["fault"])
