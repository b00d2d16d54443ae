"""Exercise 4.2: what FSDP holds before, in and after a forward pass; bf16 against fp32."""

import gc
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ranks import MIB, count_collectives, main, on_ranks

LAYERS, WIDTH = 8, 512
# Strategy as FSDP1 called it: whether FSDP2 frees the parameters after the forward pass.
STRATEGIES = {"DDP": None, "SHARD_GRAD_OP": False, "FULL_SHARD": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tensor_bytes():
    """Bytes of all tensors that Python knows and of their gradients, each storage once.

    The least of some moments: Gloo's threads let go of theirs a moment after a collective ends, and
    nothing computes meanwhile.
    """

    def count():
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        local = [t._local_tensor if isinstance(t, DTensor) else t for t in (*tensors, *gradients)]
        storages = [t.untyped_storage() for t in local]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return min(time.sleep(0.005) or count() for _ in range(6))


def make(groups, frees=True, width=WIDTH):
    """Layers of one size under FSDP in so many groups of neighbours; of no group under DDP.

    Also returns the layers. tensor_bytes() counts what is made from now on.
    """
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    layers = list(model)
    if not groups:  # with the gradients in DDP's buckets alone
        return DistributedDataParallel(model, gradient_as_bucket_view=True), layers
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    size = LAYERS // groups
    for begin in range(0, LAYERS, size) if groups > 1 else ():
        fully_shard(layers[begin : begin + size], mesh=mesh, reshard_after_forward=frees)
    return fully_shard(model, mesh=mesh, reshard_after_forward=frees), layers


def step_mib(groups, frees=True):
    """MiB before, at most in and after the forward pass, and after the backward pass."""
    model, layers = make(groups, frees)
    seen = []
    gc.collect()
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(tensor_bytes()))
    x = torch.ones(1, WIDTH)  # one sample: activations are small beside the parameters
    before = tensor_bytes()
    loss = model(x).sum()
    after = tensor_bytes()
    loss.backward()
    return tuple(count / MIB for count in (before, max(seen), after, tensor_bytes()))


def hold(rank):
    ways = {name: (0,) if frees is None else (LAYERS, frees) for name, frees in STRATEGIES.items()}
    return [(name, rank, *step_mib(*way)) for name, way in ways.items()]


def forward():
    rows = [row for pair in zip(*on_ranks(hold), strict=True) for row in pair]
    size = WIDTH * WIDTH * 4 / MIB
    title = f"{LAYERS} layers of {size:g} MiB on two ranks: MiB of all tensors of a rank"
    head = ("before forward", "in forward", "after forward", "after backward")
    return title, ("strategy", "rank", *head), rows


def gather_in_groups(rank):
    rows = []
    for groups in (1, 2, 4, LAYERS):
        mib = []
        counts = count_collectives(lambda n=groups, mib=mib: mib.extend(step_mib(n)))
        kinds = ("allgather", "reducescatter")
        calls = [sum(n for name, n in counts.items() if kind in name) for kind in kinds]
        rows.append((groups, *calls, *mib[:2]))
    return rows


def groups():
    """FULL_SHARD with one group, two, four and one for each layer: what auto_wrap_policy chose."""
    title = "FULL_SHARD of the same model, by the number of groups that are gathered at once"
    head = ("groups", "all-gathers", "reduce-scatters", "before forward (MiB)", "in forward (MiB)")
    return title, head, on_ranks(gather_in_groups)[0]


def sums():
    """What 1,000 updates of 0.001 and a sum of 4,096 gradients become in each precision."""
    rows = []
    for name, sum_name in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
        dtype = DTYPES[name]
        weight, update = torch.ones(1, dtype=dtype), torch.full((1,), 0.001, dtype=dtype)
        for _ in range(1000):
            weight += update
        total, gradient = torch.zeros(1, dtype=DTYPES[sum_name]), torch.full((1,), 0.01).to(dtype)
        for _ in range(4096):
            total += gradient
        rows.append((name, sum_name, torch.finfo(dtype).eps, weight.item(), total.item()))
    head = ("precision", "sums in", "next number after 1, less 1", "1 + 1,000 times 0.001")
    return "where the rounding shows", (*head, "4,096 times 0.01"), rows


if __name__ == "__main__":
    main(forward, groups, sums)
