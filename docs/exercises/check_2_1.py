"""Check of exercise 2.1: the process group and the device, on two nodes of one rank each."""

import os
from unittest import mock

import torch
import torch.distributed as dist

from checking import by_rank, has_left, load
from ranks import gather, join_group

WORLD = 2


def call(mine):
    """Call setup() and cleanup() once; return what it returned, a sum, and whether it left."""
    returned, total = mine.setup(), torch.tensor(1.0)
    if dist.is_initialized():
        dist.all_reduce(total)
    mine.cleanup()
    left = has_left()
    if not (isinstance(returned, tuple | list) and len(returned) == 4):
        raise LookupError("setup() did not return four values")
    return tuple(returned[:3]), str(returned[3]), total.item(), left


def work(me, path):
    """Each rank is the only one of its node: first without a GPU, then with a simulated one."""
    os.environ.update(RANK=str(me), LOCAL_RANK="0", WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE="1")
    backends = []

    # In the place of init_process_group, with torch's defaults; it joins through a file.
    def join(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **_):
        place = int(os.environ["RANK"]) if rank < 0 else rank
        size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        if (place, size) != (me, WORLD):  # it would wait for a rank that never comes
            raise LookupError(f"joins as rank {place} of {size}, but is {me} of {WORLD}")
        backends.append(str(backend))
        join_group(place, size, f"store{len(backends)}")

    with mock.patch.object(dist, "init_process_group", join):
        mine = load(path, "setup", "cleanup")
        plain = call(mine)
        fake = {"is_available": lambda: True, "device_count": lambda: 1}
        with mock.patch.multiple(torch.cuda, **fake, set_device=lambda device: None):
            gpu = call(mine)
    join_group(me, WORLD, "end")
    places, plain_devices, sums, left = zip(*gather(plain), strict=True)
    _, devices, _, gpu_left = zip(*gather(gpu), strict=True)
    right = [(rank, 0, WORLD) for rank in range(WORLD)]
    fits = [name in b or b == "None" for name, b in zip(("gloo", "nccl"), backends, strict=False)]
    return [
        (sums == (2, 2), "after setup() the two ranks are in one process group",
         f"a sum over the group counts {by_rank(sums)}"),
        (list(places) == right,
         "rank, local_rank and world_size are right on two nodes of one process each",
         f"{by_rank(places)}; right are {by_rank(right)}"),
        (all(fits), "the backend is one for the device",
         f"{' without a GPU and '.join(backends)} with one"),
        (set(plain_devices) == {"cpu"}, "without a GPU the device is the CPU",
         by_rank(plain_devices)),
        (set(devices) == {"cuda:0"},
         "on two nodes with one GPU each, both ranks take the GPU that is there",
         f"{by_rank(devices)}; each node has a GPU 0 and no other"),
        (all(left + gpu_left), "after cleanup() there is no process group", "it is still there"),
    ]  # fmt: skip
