"""Check of exercise 2.1: the process group and the device, on two nodes of one rank each."""

import os
from unittest import mock

import torch
import torch.distributed as dist

from checking import MissingError, by_rank, has_left, load, main
from ranks import join_group

WORLD = 2


def call(mine, backends, reduces):
    """Call setup() and cleanup() once; say what they did."""
    returned, joined, total = mine.setup(), dist.is_initialized(), None
    if joined and reduces:
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value)
        total = value.item()
    mine.cleanup()
    left = has_left()
    if not (isinstance(returned, tuple | list) and len(returned) == 4):
        raise MissingError("setup() did not return four values")
    return {"place": tuple(returned[:3]), "device": str(returned[3]), "joined": joined,
            "sum": total, "left": left, "backend": (backends or [None])[-1]}  # fmt: skip


def work(me, path):
    """Each rank is the only one of its node: first without a GPU, then with a simulated one."""
    os.environ.update(RANK=str(me), LOCAL_RANK="0", WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE="1")
    backends = []

    # In the place of init_process_group, with torch's defaults; it joins through a file.
    def join(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **_):
        place = int(os.environ["RANK"]) if rank < 0 else rank
        size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        if (place, size) != (me, WORLD):  # it would wait for a rank that never comes
            raise MissingError(f"joins as rank {place} of {size}, but is {me} of {WORLD}")
        backends.append(backend)
        join_group(place, size, f"store{len(backends)}")

    with mock.patch.object(dist, "init_process_group", join):
        mine = load(path, "setup", "cleanup")
        plain = call(mine, backends, reduces=True)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "set_device", lambda device: None),
        ):
            return plain, call(mine, backends, reduces=False)


def judge(results):
    plain, gpu = zip(*results, strict=True)
    places, right = [r["place"] for r in plain], [(rank, 0, WORLD) for rank in range(WORLD)]
    devices, backends = [r["device"] for r in gpu], [plain[0]["backend"], gpu[0]["backend"]]
    fits = [b is None or name in str(b) for b, name in zip(backends, ("gloo", "nccl"), strict=True)]
    return [
        (all(r["joined"] and r["sum"] == 3 for r in plain),
         "after setup() the two ranks are in one process group",
         f"joined {by_rank([r['joined'] for r in plain])}"),
        (places == right,
         "rank, local_rank and world_size are right on two nodes of one process each",
         f"{by_rank(places)}; right are {by_rank(right)}"),
        (all(fits), "the backend is one for the device",
         f"{backends[0]} without a GPU and {backends[1]} with one"),
        (all(r["device"] == "cpu" for r in plain), "without a GPU the device is the CPU",
         by_rank([r["device"] for r in plain])),
        (devices == ["cuda:0"] * WORLD,
         "on two nodes with one GPU each, both ranks take the GPU that is there",
         f"{by_rank(devices)}; each node has a GPU 0 and no other"),
        (all(r["left"] for r in (*plain, *gpu)), "after cleanup() there is no process group",
         "it is still there"),
    ]  # fmt: skip


if __name__ == "__main__":
    main(work, judge, join=False)
