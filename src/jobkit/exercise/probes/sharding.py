"""Probes of exercise 4.2: the bytes that a rank holds before, in and after a forward pass."""

import gc
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jobkit.exercise.probes.counted import Counted
from jobkit.exercise.ranks import on_ranks
from jobkit.exercise.table import Table
from jobkit.units import MIB

_LAYERS, _WIDTH = 8, 512
_LOOKS = 5
# Strategy as FSDP1 called it: whether FSDP2 frees the parameters after the forward pass.
_STRATEGIES = {"DDP": None, "SHARD_GRAD_OP": False, "FULL_SHARD": True}


def storages() -> int:
    """Bytes of all tensors that Python knows and of their gradients, each storage once."""
    found = {}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    for tensor in (*tensors, *gradients):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def only_new() -> None:
    """Let storages() count what is made from now on."""
    gc.collect()
    gc.freeze()


def settled() -> int:
    """The bytes of all tensors once Gloo's threads have let go of theirs.

    A collective is complete a moment before its thread drops the last reference to what it sent
    and received. Nothing computes meanwhile, so that what is held can only become less.
    """
    least = storages()
    for _ in range(_LOOKS):
        time.sleep(0.005)
        least = min(least, storages())
    return least


def layers_of(width: int) -> nn.Sequential:
    """The model: layers of the same size, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))


def replicated(model: nn.Module) -> nn.Module:
    """DDP, with the gradients in its buckets alone."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Sequential, groups: int, frees: bool) -> nn.Module:
    """FSDP with the layers in so many groups of neighbours."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layers, size = list(model), -(-len(model) // groups)
    if groups > 1:
        for begin in range(0, len(layers), size):
            fully_shard(layers[begin : begin + size], mesh=mesh, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, reshard_after_forward=frees)
    return model


class _Moments:
    """The bytes held at each moment of a training step."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.most = 0
        for layer in layers:
            layer.register_forward_hook(self._look)
        self._model = model

    def _look(self, *_: object) -> None:
        self.most = max(self.most, settled())

    def run(self) -> tuple[float, ...]:
        """Before, at most in and after the forward pass, after the backward pass, in MiB."""
        x = torch.ones(1, _WIDTH)  # one sample: activations are small beside the parameters
        before = settled()
        loss = self._model(x).sum()
        after = settled()
        loss.backward()
        return tuple(n / MIB for n in (before, self.most, after, settled()))


def _bytes(name: str, groups: int) -> tuple[float, ...]:
    only_new()
    model, frees = layers_of(_WIDTH), _STRATEGIES[name]
    layers = list(model)
    wrapped = replicated(model) if frees is None else sharded(model, groups, frees)
    gc.collect()
    return _Moments(wrapped, layers).run()


def _by_strategy(rank: int) -> list[tuple[object, ...]]:
    return [(name, rank, *_bytes(name, _LAYERS)) for name in _STRATEGIES]


def forward() -> list[Table]:
    """DDP, SHARD_GRAD_OP and FULL_SHARD."""
    rows = [row for pair in zip(*on_ranks(_by_strategy), strict=True) for row in pair]
    return [
        Table(
            f"{_LAYERS} layers of {_WIDTH * _WIDTH * 4 / MIB:g} MiB on two ranks: MiB "
            "of all tensors of a rank",
            ("strategy", "rank", "before forward", "in forward", "after forward",
             "after backward"),
            rows,
        )
    ]  # fmt: skip


def groups() -> list[Table]:
    """FULL_SHARD with one group, two, four and one for each layer: what auto_wrap_policy chose."""
    rows = on_ranks(_by_groups)[0]
    return [
        Table(
            "FULL_SHARD of the same model, by the number of groups that are gathered at once",
            ("groups", "all-gathers", "reduce-scatters", "before forward (MiB)",
             "in forward (MiB)"),
            rows,
        )
    ]  # fmt: skip


def _by_groups(rank: int) -> list[tuple[object, ...]]:
    return [(count, *_grouped(count)) for count in (1, 2, 4, _LAYERS)]


def _grouped(count: int) -> tuple[float, ...]:
    only_new()
    model = layers_of(_WIDTH)
    layers = list(model)
    wrapped = sharded(model, count, frees=True)
    gc.collect()
    with Counted() as counted:
        before, most, *_ = _Moments(wrapped, layers).run()
    return counted.calls("allgather"), counted.calls("reducescatter"), before, most
