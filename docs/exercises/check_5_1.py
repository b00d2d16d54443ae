"""Check of exercise 5.1: what a rank's program does, in which order, and what it leaves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from checking import by_rank, load, main
from ranks import join_group, leave_group

WORLD = 2
DRY, UNKNOWN = "dry run", "unknown strategy"


class Tools:
    """What main() is given: each call is noted."""

    def __init__(self, rank, name):
        self.rank, self.name, self.calls = rank, name, []

    def setup(self):
        """Join a group of its own for each try."""
        self.calls.append("setup")
        join_group(self.rank, WORLD, f"store-{self.name}")
        return self.rank, self.rank, WORLD, torch.device("cpu")

    def data(self, rank, world_size):
        """One batch, of this rank."""
        self.calls.append("data")
        return [torch.full((4, 6), float(rank))]

    def model(self):
        """A small model."""
        self.calls.append("model")
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def ddp(self, model, device):
        """Replicated."""
        self.calls.append("ddp")
        return DistributedDataParallel(model.to(device))

    def fsdp(self, model, device):
        """Sharded."""
        self.calls.append("fsdp")
        fully_shard(model.to(device), mesh=init_device_mesh("cpu", (WORLD,)))
        return model

    def optimizer(self, model):
        """Plain SGD."""
        self.calls.append("optimizer")
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def cleanup(self):
        """Leave the group."""
        self.calls.append("cleanup")
        dist.destroy_process_group()


def kind_of(model):
    """The strategy of a model, or its class."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "fsdp" if isinstance(model, FSDPModule) else type(model).__name__


def observe(mine, rank, strategy, dry=False):
    """Call main() once; say what it did."""
    tools, trained, refused = Tools(rank, f"{strategy}-{dry}"), [], False

    def train(model, loader, optimizer, device):
        parameters = {id(p) for p in model.parameters()}
        stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        trained.append(
            {
                "kind": kind_of(model),
                "joined": dist.is_initialized(),
                "steps it": parameters.issuperset(stepped),
                "loader": int(loader[0][0, 0]),
            }
        )

    try:
        mine.main(tools, strategy, None if dry else train)
    except ValueError:
        if strategy != UNKNOWN:
            raise
        refused = True
    left = not dist.is_initialized()
    leave_group()
    return {"calls": tools.calls, "trained": trained, "left": left, "refused": refused}


def work(rank, path):
    """Both strategies, a dry run, and a strategy that is none."""
    mine = load(path, "main")
    results = {name: observe(mine, rank, name) for name in ("ddp", "fsdp", UNKNOWN)}
    return results | {DRY: observe(mine, rank, "ddp", dry=True)}


def judge_training(name, results):
    """The promises of one strategy."""
    trained = [result[name]["trained"] for result in results]
    counts = [len(calls) for calls in trained]
    if counts != [1] * WORLD:
        return [(False, "", f"{name}: train() was called {by_rank(counts)}, not once")]
    seen = [calls[0] for calls in trained]
    kinds, data = [call["kind"] for call in seen], [call["loader"] for call in seen]
    return [
        (
            kinds == [name] * WORLD,
            f"{name}: train() gets a model of that strategy",
            f"{name}: train() got a model of kind {by_rank(kinds)}",
        ),
        (
            all(call["joined"] for call in seen),
            f"{name}: the ranks are in a process group while they train",
            f"{name}: there is no process group while train() runs",
        ),
        (
            all(call["steps it"] for call in seen),
            f"{name}: the optimizer has the parameters of the model that is trained",
            f"{name}: the optimizer has parameters that the model in train() does not have: its "
            "steps change nothing",
        ),
        (
            data == list(range(WORLD)),
            f"{name}: each rank trains on its own data",
            f"{name}: the data are those of rank {by_rank(data)}",
        ),
    ]


def judge(results):
    """Say of each promise whether it is kept."""
    needed = ("setup", "data", "model", "ddp", "optimizer")
    absent = [name for name in needed if any(name not in r[DRY]["calls"] for r in results)]
    return [
        *judge_training("ddp", results),
        *judge_training("fsdp", results),
        (
            not absent,
            "a dry run does everything but the training",
            f"a dry run does not come to: {', '.join(absent)}",
        ),
        (
            all(result[name]["left"] for result in results for name in ("ddp", "fsdp", DRY)),
            "nothing is left of the process group at the end",
            "main() ends while its process group is still there",
        ),
        (
            all(result[UNKNOWN]["refused"] for result in results),
            "an unknown strategy is refused",
            f"strategy '{UNKNOWN}' ended without a ValueError",
        ),
    ]


if __name__ == "__main__":
    main(work, judge, join=False)
