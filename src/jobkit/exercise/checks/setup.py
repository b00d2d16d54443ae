"""Check of exercise 2.1: the process group and the device, on two nodes of one rank each."""

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from jobkit.exercise.checks.judge import Remark, check, each_rank, load, remark
from jobkit.exercise.ranks import join_group

_WORLD = 2
_REAL = dist.init_process_group


class WrongPlaceError(Exception):
    """The rank joins as another one."""


class _Join:
    """Takes the place of init_process_group: notes how it is called, and joins through a file.

    A rank that joins in another's place would wait for one that never comes.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.backends: list[str | None] = []

    def __call__(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        store: object = None,
        **_: object,
    ) -> None:
        """As torch takes it: without a rank and a size those of the environment."""
        place = int(os.environ["RANK"]) if rank < 0 else rank
        size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        if (place, size) != (self._rank, _WORLD):
            mine = f"rank {self._rank} of {_WORLD}"
            raise WrongPlaceError(f"joins as rank {place} of {size}, but is {mine}")
        self.backends.append(backend)
        with mock.patch.object(dist, "init_process_group", _REAL):
            join_group(place, size, f"store{len(self.backends)}")


def _try(mine: ModuleType, join: _Join, reduces: bool) -> dict[str, Any]:
    """Call setup() and cleanup() once; say what they did."""
    before = len(join.backends)
    returned = mine.setup()
    joined = dist.is_initialized()
    total = None
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
        "joins": len(join.backends) - before,
        "sum": total,
        "left": left,
        "backend": join.backends[-1] if join.backends else None,
    }


def work(rank: int, path: str) -> list[dict[str, Any]]:
    """Each rank is the only one of its node: first without a GPU, then with one that is feigned."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(_WORLD), LOCAL_WORLD_SIZE="1")
    join = _Join(rank)
    with mock.patch.object(dist, "init_process_group", join):
        mine = load(path, "setup", "cleanup")
        plain = _try(mine, join, reduces=True)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "set_device", lambda device: None),
        ):
            return [plain, _try(mine, join, reduces=False)]


def judge(found: Sequence[list[dict[str, Any]]]) -> list[Remark]:
    """Say of each promise whether it is kept."""
    plain, gpu = [each[0] for each in found], [each[1] for each in found]
    joined = all(each["joined"] for each in plain)
    places = [each["place"] for each in plain]
    right = [(rank, 0, _WORLD) for rank in range(_WORLD)]
    devices = [each["device"] for each in gpu]
    backends = [str(each["backend"]) for each in (*plain, *gpu)]
    fits = all(
        each["backend"] is None or name in str(each["backend"])
        for each, name in [(plain[0], "gloo"), (gpu[0], "nccl")]
    )
    return [
        remark(
            joined and all(each["sum"] == 3 for each in plain),
            "the two ranks are in one process group",
            f"after setup() there is no group of both ranks (joined: "
            f"{each_rank([each['joined'] for each in plain])})",
        ),
        remark(
            places == right,
            "rank, local_rank and world_size are right on two nodes of one process each",
            f"setup() returned (rank, local_rank, world_size) = {each_rank(places)}; two nodes "
            f"of one process each have {each_rank(right)}",
        ),
        remark(
            fits or not joined,
            "the backend is one for the device",
            f"the backends are {backends[0]} without a GPU and {backends[-1]} with one",
        ),
        remark(
            all(each["device"] == "cpu" for each in plain),
            "without a GPU the device is the CPU",
            f"without a GPU the device is {each_rank([each['device'] for each in plain])}",
        ),
        remark(
            devices == ["cuda:0"] * _WORLD,
            "on two nodes with one GPU each, both ranks take the GPU that is there",
            f"on two nodes with one GPU each the device is {each_rank(devices)}; "
            "each node has a GPU 0 and no other",
        ),
        remark(
            all(each["left"] for each in (*plain, *gpu)),
            "after cleanup() there is no process group",
            "after cleanup() the process group is still there",
        ),
    ]


def run(path: str) -> list[Remark]:
    """Check a file."""
    return check(path, work, judge, join=False)
