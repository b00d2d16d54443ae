"""Check of exercise 2.1: the process group and the device, on two nodes of one rank each."""

import os
from unittest import mock

import torch
import torch.distributed as dist

from checking import by_rank, load, main
from ranks import join_group

WORLD = 2
REAL_INIT = dist.init_process_group


class WrongPlaceError(Exception):
    """The rank joins as another one, and would wait for one that never comes."""


class Join:
    """Takes the place of init_process_group: notes how it is called, and joins through a file."""

    def __init__(self, rank):
        self.rank, self.backends = rank, []

    def __call__(
        self, backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **_
    ):  # as torch takes it: without a rank and a size those of the environment
        place = int(os.environ["RANK"]) if rank < 0 else rank
        size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        if (place, size) != (self.rank, WORLD):
            text = f"joins as rank {place} of {size}, but is rank {self.rank} of {WORLD}"
            raise WrongPlaceError(text)
        self.backends.append(backend)
        with mock.patch.object(dist, "init_process_group", REAL_INIT):
            join_group(place, size, f"store{len(self.backends)}")


def call(mine, join, reduces):
    """Call setup() and cleanup() once; say what they did."""
    returned, joined, total = mine.setup(), dist.is_initialized(), None
    if joined and reduces:
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value)
        total = value.item()
    mine.cleanup()
    left = not dist.is_initialized()
    if not left:
        dist.destroy_process_group()
    if not (isinstance(returned, tuple | list) and len(returned) == 4):
        returned = (None, None, None, None)
    return {
        "place": tuple(returned[:3]),
        "device": str(returned[3]),
        "joined": joined,
        "sum": total,
        "left": left,
        "backend": join.backends[-1] if join.backends else None,
    }


def work(rank, path):
    """Each rank is the only one of its node: first without a GPU, then with a simulated one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE="1")
    join = Join(rank)
    with mock.patch.object(dist, "init_process_group", join):
        mine = load(path, "setup", "cleanup")
        plain = call(mine, join, reduces=True)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "set_device", lambda device: None),
        ):
            return plain, call(mine, join, reduces=False)


def judge(results):
    """Say of each promise whether it is kept."""
    plain, gpu = zip(*results, strict=True)
    places, right = [r["place"] for r in plain], [(rank, 0, WORLD) for rank in range(WORLD)]
    devices, backends = [r["device"] for r in gpu], [str(r["backend"]) for r in (*plain, *gpu)]
    pairs = ((plain[0]["backend"], "gloo"), (gpu[0]["backend"], "nccl"))
    fits = all(backend is None or name in str(backend) for backend, name in pairs)
    joined = [r["joined"] for r in plain]
    return [
        (
            all(joined) and all(r["sum"] == 3 for r in plain),
            "the two ranks are in one process group",
            f"after setup() there is no group of both ranks (joined: {by_rank(joined)})",
        ),
        (
            places == right,
            "rank, local_rank and world_size are right on two nodes of one process each",
            f"setup() returned (rank, local_rank, world_size) = {by_rank(places)}; two nodes of "
            f"one process each have {by_rank(right)}",
        ),
        (
            fits or not all(joined),
            "the backend is one for the device",
            f"the backends are {backends[0]} without a GPU and {backends[-1]} with one",
        ),
        (
            all(r["device"] == "cpu" for r in plain),
            "without a GPU the device is the CPU",
            f"without a GPU the device is {by_rank([r['device'] for r in plain])}",
        ),
        (
            devices == ["cuda:0"] * WORLD,
            "on two nodes with one GPU each, both ranks take the GPU that is there",
            f"on two nodes with one GPU each the device is {by_rank(devices)}; each node has a "
            "GPU 0 and no other",
        ),
        (
            all(r["left"] for r in (*plain, *gpu)),
            "after cleanup() there is no process group",
            "after cleanup() the process group is still there",
        ),
    ]


if __name__ == "__main__":
    main(work, judge, join=False)
