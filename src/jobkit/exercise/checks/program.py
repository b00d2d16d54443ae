"""Check of exercise 5.1: what a rank's program does, in which order, and what it leaves."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jobkit.exercise.checks.judge import Remark, check, each_rank, load, remark
from jobkit.exercise.ranks import join_group, leave_group

_WORLD = 2
_DRY, _UNKNOWN = "dry run", "unknown strategy"


class Tools:
    """What main() is given: each call is noted."""

    def __init__(self, rank: int, name: str) -> None:
        self._rank, self._name = rank, name
        self.calls: list[str] = []
        self.asked: tuple[int, int] | None = None

    def setup(self) -> tuple[int, int, int, torch.device]:
        """Join a group of its own for each try."""
        self.calls.append("setup")
        join_group(self._rank, _WORLD, f"store-{self._name}")
        return self._rank, self._rank, _WORLD, torch.device("cpu")

    def data(self, rank: int, world_size: int) -> list[torch.Tensor]:
        """One batch, of this rank."""
        self.calls.append("data")
        self.asked = (rank, world_size)
        return [torch.full((4, 6), float(rank))]

    def model(self) -> nn.Module:
        """A small model."""
        self.calls.append("model")
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def ddp(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Replicated."""
        self.calls.append("ddp")
        return DistributedDataParallel(model.to(device))

    def fsdp(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Sharded."""
        self.calls.append("fsdp")
        fully_shard(model.to(device), mesh=init_device_mesh("cpu", (_WORLD,)))
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Plain SGD."""
        self.calls.append("optimizer")
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def cleanup(self) -> None:
        """Leave the group."""
        self.calls.append("cleanup")
        dist.destroy_process_group()


def _kind(model: object) -> str:
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    return "fsdp" if isinstance(model, FSDPModule) else type(model).__name__


def _observe(mine: Any, rank: int, strategy: str, dry: bool) -> dict[str, Any]:
    """Call main() once; say what it did."""
    name = _DRY if dry else strategy
    tools = Tools(rank, name.replace(" ", "-"))
    trained: list[dict[str, Any]] = []

    def train(model: nn.Module, loader: Any, optimizer: Optimizer, device: torch.device) -> None:
        own = {id(p) for p in model.parameters()}
        trained.append(
            {
                "kind": _kind(model),
                "joined": dist.is_initialized(),
                "own": all(id(p) in own for g in optimizer.param_groups for p in g["params"]),
                "loader": float(loader[0][0, 0]),
            }
        )

    error = None
    try:
        mine.main(tools, strategy, None if dry else train)
    except ValueError as refused:
        if strategy != _UNKNOWN:
            raise
        error = type(refused).__name__
    left = not dist.is_initialized()
    leave_group()
    return {"calls": tools.calls, "asked": tools.asked, "trained": trained, "left": left,
            "error": error}  # fmt: skip


def work(rank: int, path: str) -> dict[str, Any]:
    """Both strategies, a dry run, and a strategy that is none."""
    mine = load(path, "main")
    return {
        "ddp": _observe(mine, rank, "ddp", dry=False),
        "fsdp": _observe(mine, rank, "fsdp", dry=False),
        _DRY: _observe(mine, rank, "ddp", dry=True),
        _UNKNOWN: _observe(mine, rank, _UNKNOWN, dry=False),
    }


def _of_training(name: str, found: Sequence[dict[str, Any]]) -> list[Remark]:
    """The remarks on one strategy."""
    ran = [each[name] for each in found]
    counts = [len(each["trained"]) for each in ran]
    if counts != [1] * _WORLD:
        return [Remark(False, f"{name}: train() was called {each_rank(counts)}, not once")]
    seen = [each["trained"][0] for each in ran]
    kinds, data = [each["kind"] for each in seen], [each["loader"] for each in seen]
    return [
        remark(
            kinds == [name] * _WORLD,
            f"{name}: train() gets a model of that strategy",
            f"{name}: train() got a model of kind {each_rank(kinds)}",
        ),
        remark(
            all(each["joined"] for each in seen),
            f"{name}: the ranks are in a process group while they train",
            f"{name}: there is no process group while train() runs",
        ),
        remark(
            all(each["own"] for each in seen),
            f"{name}: the optimizer has the parameters of the model that is trained",
            f"{name}: the optimizer has parameters that the model in train() does not have: its "
            "steps change nothing",
        ),
        remark(
            data == [float(rank) for rank in range(_WORLD)],
            f"{name}: each rank trains on its own data",
            f"{name}: the data are those of rank {each_rank([int(d) for d in data])}",
        ),
    ]


def judge(found: Sequence[dict[str, Any]]) -> list[Remark]:
    """Say of each promise whether it is kept."""
    dry = [each[_DRY] for each in found]
    ran = [each[name] for each in found for name in ("ddp", "fsdp", _DRY)]
    absent = [name for name in ("setup", "data", "model", "ddp", "optimizer")
              if any(name not in each["calls"] for each in dry)]  # fmt: skip
    return [
        *_of_training("ddp", found),
        *_of_training("fsdp", found),
        remark(
            not absent,
            "a dry run does everything but the training",
            f"a dry run does not come to: {', '.join(absent)}",
        ),
        remark(
            all(each["left"] for each in ran),
            "nothing is left of the process group at the end",
            "main() ends while its process group is still there",
        ),
        remark(
            all(each[_UNKNOWN]["error"] for each in found),
            "an unknown strategy is refused",
            f"strategy '{_UNKNOWN}' ended without a ValueError",
        ),
    ]


def run(path: str) -> list[Remark]:
    """Check a file."""
    return check(path, work, judge, join=False)
