"""Exercise 4.2: what FSDP holds before, in and after a forward pass; bf16 against fp32."""

import os

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ranks import MIB, main, on_ranks

LAYERS, WIDTH = 8, 512
# Strategy as FSDP1 called it: groups, and whether FSDP2 frees parameters after the forward pass.
STRATEGIES = {"DDP": (0,), "SHARD_GRAD_OP": (LAYERS, False), "FULL_SHARD": (LAYERS, True)}


def count_collectives(call):
    """What a call returns, and by name how often it issued each collective (torch's profiler)."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler reports its own start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = call()
    events = [event for event in profiler.key_averages() if event.key.startswith("c10d::")]
    return result, {event.key.replace("_", ""): event.count for event in events}


def local_mib(tensors):
    """MiB of this rank's part of some tensors, of which one may be absent."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(part.nbytes for part in parts) / MIB


def make(groups, frees=True, width=WIDTH):
    """Layers of one size under FSDP in so many groups of neighbours; of no group under DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    if not groups:
        return DistributedDataParallel(model)
    layers, size = list(model), LAYERS // groups
    for begin in range(0, LAYERS, size) if groups > 1 else ():
        fully_shard(layers[begin : begin + size], reshard_after_forward=frees)
    return fully_shard(model, reshard_after_forward=frees)


def step_mib(groups, frees=True):
    """MiB before, at most in and after the forward pass, and after the backward pass.

    Counted are parameters and gradients. A rank keeps its shards while whole parameters are there.
    """
    model, seen = make(groups, frees), []
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    shards = local_mib(model.parameters())

    def held():
        weights = [layer.weight for layer in layers]
        whole = [w for w in weights if groups and not isinstance(w, DTensor)]
        return shards + local_mib([*whole, *(weight.grad for weight in weights)])

    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(held()))
    before, loss, after = held(), model(torch.ones(1, WIDTH)).sum(), held()
    loss.backward()
    return before, max(seen), after, held()


def hold(rank):
    return [(name, rank, *step_mib(*way)) for name, way in STRATEGIES.items()]


def forward():
    rows = [row for pair in zip(*on_ranks(hold), strict=True) for row in pair]
    title = f"{LAYERS} layers of 1 MiB on two ranks: MiB of parameters and gradients of a rank"
    head = ("before forward", "in forward", "after forward", "after backward")
    return title, ("strategy", "rank", *head), rows


def gather_in_groups(rank):
    rows = []
    for groups in (1, 2, 4, LAYERS):
        (before, most, *_), calls = count_collectives(lambda n=groups: step_mib(n))
        kinds = ("allgather", "reducescatter")
        counts = [sum(n for name, n in calls.items() if kind in name) for kind in kinds]
        rows.append((groups, *counts, before, most))
    return rows


def groups():
    """FULL_SHARD with one group, two, four and one for each layer: what auto_wrap_policy chose."""
    title = "FULL_SHARD of the same model, by the number of groups that are gathered at once"
    head = ("groups", "all-gathers", "reduce-scatters", "before forward (MiB)", "in forward (MiB)")
    return title, head, on_ranks(gather_in_groups)[0]


def sums():
    """What 1,000 updates of 0.001 and a sum of 4,096 gradients become in each precision."""
    rows, fp32, bf16 = [], torch.float32, torch.bfloat16
    for dtype, sum_dtype in ((fp32, fp32), (bf16, bf16), (bf16, fp32)):
        weight, update = torch.ones(1, dtype=dtype), torch.full((1,), 0.001, dtype=dtype)
        for _ in range(1000):
            weight += update
        total, gradient = torch.zeros(1, dtype=sum_dtype), torch.full((1,), 0.01, dtype=dtype)
        for _ in range(4096):
            total += gradient
        names = [str(part).removeprefix("torch.") for part in (dtype, sum_dtype)]
        rows.append((*names, torch.finfo(dtype).eps, weight.item(), total.item()))
    head = ("precision", "sums in", "next number after 1, less 1", "1 + 1,000 times 0.001")
    return "where the rounding shows", (*head, "4,096 times 0.01"), rows


if __name__ == "__main__":
    main(forward, groups, sums)
