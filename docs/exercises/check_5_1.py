"""Check of exercise 5.1: what a rank's program does, in which order, and what it leaves."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checking import by_rank, has_left, load
from ranks import gather, join_group

WORLD = 2
NEEDED = ("setup", "data", "model", "ddp", "optimizer")


def observe(mine, rank, strategy, dry=False):
    """Call main() once; return what it called, what it trained, and whether the group is left."""
    called, trained = [], []

    def setup():
        join_group(rank, WORLD, f"store-{strategy}-{dry}")
        return rank, rank, WORLD, torch.device("cpu")

    real = {
        "setup": setup,
        "data": lambda rank, world_size: [torch.full((4, 6), float(rank))],  # one batch
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
        "ddp": lambda model, device: DistributedDataParallel(model.to(device)),
        "fsdp": lambda model, device: fully_shard(model.to(device)),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "cleanup": dist.destroy_process_group,
    }

    def noted(name):
        return lambda *args: (called.append(name), real[name](*args))[1]

    tools = SimpleNamespace(**{name: noted(name) for name in real})

    def train(model, loader, optimizer, device):
        parameters = {id(p) for p in model.parameters()}
        stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        steps_it, data = parameters.issuperset(stepped), int(loader[0][0, 0])
        trained.append((type(model).__name__, dist.is_initialized(), steps_it, data))

    mine.main(tools, strategy, None if dry else train)
    return called, trained, has_left()


def judge_training(name, model, trained):
    counts = [len(calls) for calls in trained]
    if counts != [1] * WORLD:
        return [(False, f"{name}: train() is called once", by_rank(counts))]
    kinds, joined, steps_it, data = zip(*(calls[0] for calls in trained), strict=True)
    return [
        (kinds == (model,) * WORLD, f"{name}: train() gets a model of that strategy",
         by_rank(kinds)),
        (all(joined), f"{name}: the ranks are in a process group while they train",
         "there is none"),
        (all(steps_it), f"{name}: the optimizer has the parameters of the model that is trained",
         "it has others, and its steps change nothing"),
        (data == tuple(range(WORLD)), f"{name}: each rank trains on its own data",
         f"data of rank {by_rank(data)}"),
    ]  # fmt: skip


def work(rank, path):
    """Both strategies, a dry run, and a strategy that is none."""
    mine, refused = load(path, "main"), False
    tries = [observe(mine, rank, *words) for words in (("ddp",), ("fsdp",), ("ddp", True))]
    try:
        observe(mine, rank, "unknown strategy")
    except ValueError:
        refused = True
    join_group(rank, WORLD, "end")
    ddp, fsdp, dry = ([gather(part) for part in parts] for parts in tries)
    absent = [name for name in NEEDED if any(name not in called for called in dry[0])]
    return [
        *judge_training("ddp", "DistributedDataParallel", ddp[1]),
        *judge_training("fsdp", "FSDPSequential", fsdp[1]),
        (not absent, "a dry run does everything but the training", f"not {', '.join(absent)}"),
        (all(ddp[2] + fsdp[2] + dry[2]), "nothing is left of the process group at the end",
         "it is still there"),
        (all(gather(refused)), "an unknown strategy is refused",
         "it ended without a ValueError"),
    ]  # fmt: skip
