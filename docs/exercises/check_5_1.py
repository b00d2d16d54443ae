"""Check of exercise 5.1: what a rank's program does, in which order, and what it leaves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from checking import by_rank, has_left, load, main
from ranks import join_group

WORLD = 2
DRY, UNKNOWN = "dry run", "unknown strategy"
NEEDED = ("setup", "data", "model", "ddp", "optimizer")


class Tools:
    """What main() is given; each try joins a group of its own."""

    def __init__(self, rank, name):
        self.rank, self.name = rank, name

    def setup(self):
        join_group(self.rank, WORLD, f"store-{self.name}")
        return self.rank, self.rank, WORLD, torch.device("cpu")

    def data(self, rank, world_size):
        return [torch.full((4, 6), float(rank))]  # one batch

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def ddp(self, model, device):
        return DistributedDataParallel(model.to(device))

    def fsdp(self, model, device):
        return fully_shard(model.to(device), mesh=init_device_mesh("cpu", (WORLD,)))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def cleanup(self):
        dist.destroy_process_group()


def observe(mine, rank, strategy, dry=False):
    """Call main() once; say what it did."""
    tools, called, trained, refused = Tools(rank, f"{strategy}-{dry}"), [], [], False

    def noted(name):
        real = getattr(tools, name)
        return lambda *args: (called.append(name), real(*args))[1]

    for name in (*NEEDED, "fsdp", "cleanup"):
        setattr(tools, name, noted(name))

    def train(model, loader, optimizer, device):
        parameters = {id(p) for p in model.parameters()}
        stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        kinds = {"ddp": DistributedDataParallel, "fsdp": FSDPModule}
        kind = next((k for k, c in kinds.items() if isinstance(model, c)), type(model).__name__)
        steps_it, data = parameters.issuperset(stepped), int(loader[0][0, 0])
        trained.append((kind, dist.is_initialized(), steps_it, data))

    try:
        mine.main(tools, strategy, None if dry else train)
    except ValueError:
        if strategy != UNKNOWN:
            raise
        refused = True
    return {"calls": called, "trained": trained, "left": has_left(), "refused": refused}


def work(rank, path):
    """Both strategies, a dry run, and a strategy that is none."""
    mine = load(path, "main")
    results = {name: observe(mine, rank, name) for name in ("ddp", "fsdp", UNKNOWN)}
    return results | {DRY: observe(mine, rank, "ddp", dry=True)}


def judge_training(name, results):
    trained = [result[name]["trained"] for result in results]
    counts = [len(calls) for calls in trained]
    if counts != [1] * WORLD:
        return [(False, f"{name}: train() is called once", by_rank(counts))]
    kinds, joined, steps_it, data = zip(*(calls[0] for calls in trained), strict=True)
    return [
        (kinds == (name,) * WORLD, f"{name}: train() gets a model of that strategy",
         by_rank(kinds)),
        (all(joined), f"{name}: the ranks are in a process group while they train",
         "there is none"),
        (all(steps_it), f"{name}: the optimizer has the parameters of the model that is trained",
         "it has others, and its steps change nothing"),
        (data == tuple(range(WORLD)), f"{name}: each rank trains on its own data",
         f"data of rank {by_rank(data)}"),
    ]  # fmt: skip


def judge(results):
    absent = [name for name in NEEDED if any(name not in r[DRY]["calls"] for r in results)]
    return [
        *judge_training("ddp", results),
        *judge_training("fsdp", results),
        (not absent, "a dry run does everything but the training", f"not {', '.join(absent)}"),
        (all(r[name]["left"] for r in results for name in ("ddp", "fsdp", DRY)),
         "nothing is left of the process group at the end", "it is still there"),
        (all(r[UNKNOWN]["refused"] for r in results), "an unknown strategy is refused",
         "it ended without a ValueError"),
    ]  # fmt: skip


if __name__ == "__main__":
    main(work, judge, join=False)
