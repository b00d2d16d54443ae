"""The state of a training, as tensors by name: what a checkpoint holds.

Names are those of the bare model, so that any strategy reads what any other wrote:

    model.NAME               a parameter
    optim.NAME.KEY           what the optimizer keeps for it
    rank.R.KEY               rank R's own: buffers (buffer.NAME), the state of its random numbers,
                             its sums over the epoch in progress, what its strategy keeps

Sharded tensors are DTensors, of which each rank has its part.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobkit.payload import random_numbers

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_OWN = "rank."
_BUFFER = "buffer."
_STRATEGY = "strategy."
_LOSS_SUM = "epoch.loss_sum"
_TIMING = "epoch.timing"


def own_prefix(rank: int) -> str:
    """The prefix of the names of a rank's own tensors."""
    return f"{_OWN}{rank}."


def writers(names: Iterable[str]) -> list[int]:
    """The ranks that put tensors of their own into a checkpoint of these names."""
    ranks = {n.split(".")[1] for n in names if n.startswith(_OWN) and n.endswith(_LOSS_SUM)}
    return sorted(int(rank) for rank in ranks if rank.isdecimal())


def shared_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """Parameters and optimizer state that this rank holds: the live tensors, not copies."""
    trainer.strategy.settle()
    state = trainer.optimizer.state
    found: dict[str, Tensor] = {}
    for name, parameter in trainer.strategy.named_parameters().items():
        found[f"model.{name}"] = parameter.detach()
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optim.{name}.{key}"] = value
    return found


def own_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """The tensors that differ between the ranks."""
    strategy = trainer.strategy
    found = {f"{_BUFFER}{name}": b for name, b in strategy.named_buffers().items()}
    found |= {f"{_STRATEGY}{name}": t for name, t in strategy.own_state().items()}
    found |= random_numbers.state(strategy.device, strategy.devices)
    found[_LOSS_SUM] = trainer.loss_sum
    found[_TIMING] = torch.tensor(trainer.clock.so_far(), dtype=torch.float64)
    return found


def all_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """All tensors that this rank puts into a checkpoint."""
    prefix = own_prefix(trainer.group.place.rank)
    own = {f"{prefix}{name}": t for name, t in own_tensors(trainer).items()}
    return shared_tensors(trainer) | own


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, so that training can continue while they are written."""
    return {
        name: t.detach().clone() if t.device.type == "cpu" else t.detach().to("cpu")
        for name, t in tensors.items()
    }


class Initial:
    """The initial state of a training, to start from scratch if no checkpoint can be loaded."""

    def __init__(self, trainer: "Trainer") -> None:
        self._shared = copied(shared_tensors(trainer))
        self._own = copied(own_tensors(trainer))

    def put_back(self, trainer: "Trainer") -> None:
        """Restore the initial state after priming or a partial load."""
        trainer.optimizer.state.clear()
        for name, tensor in shared_tensors(trainer).items():
            tensor.copy_(self._shared[name])
        take_own(trainer, self._own)


def prime(trainer: "Trainer") -> None:
    """Have the optimizer and the strategy make the state of their first iteration.

    Its values do not matter: a checkpoint is loaded over them.
    """
    trainer.strategy.warm_up()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


def forget_absent(trainer: "Trainer", known: Iterable[str]) -> None:
    """Drop optimizer state that the checkpoint lacks: its parameter never had a gradient."""
    names, state = set(known), trainer.optimizer.state
    for name, parameter in trainer.strategy.named_parameters().items():
        kept = state.get(parameter)
        if kept and not any(f"optim.{name}.{key}" in names for key in kept):
            del state[parameter]


def take_own(trainer: "Trainer", own: Mapping[str, Tensor]) -> None:
    """Copy this rank's own tensors from a checkpoint; those it lacks stay unchanged."""
    strategy = trainer.strategy
    for name, buffer in strategy.named_buffers().items():
        if f"{_BUFFER}{name}" in own:
            buffer.copy_(own[f"{_BUFFER}{name}"])
    strategy.take_own_state(
        {k.removeprefix(_STRATEGY): t for k, t in own.items() if k.startswith(_STRATEGY)}
    )
    random_numbers.take(own, strategy.device, strategy.devices)
    trainer.loss_sum = own[_LOSS_SUM].to(trainer.loss_sum)
    images, elapsed_s, data_wait_s = own[_TIMING].tolist()
    trainer.clock.carry(int(images), elapsed_s, data_wait_s)


def merged(ranks: list[dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """The own tensors of a rank in another layout, merged from those of all ranks.

    Buffers are averaged over the ranks that have them, as for an evaluation; rank 0 gets the sums
    of the epoch. Random numbers are not merged: the ranks begin from seeds of the iteration.
    """
    found = {}
    for name in dict.fromkeys(k for own in ranks for k in own if k.startswith(_BUFFER)):
        values = torch.stack([own[name] for own in ranks if name in own])
        found[name] = values.mean(0) if values.is_floating_point() else values[0]
    losses = torch.stack([own[_LOSS_SUM] for own in ranks])
    timings = torch.stack([own[_TIMING] for own in ranks])
    first = rank == 0
    found[_LOSS_SUM] = losses.sum() * first
    # Images add up; of the times, the slowest rank's count.
    images = timings[:, :1].sum(0)
    found[_TIMING] = torch.cat([images, timings[:, 1:].amax(0)]) * first
    for name, value in ranks[0].items():
        if name.startswith(f"{_STRATEGY}scaler."):
            found[name] = value
    return found
