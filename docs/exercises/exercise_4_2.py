"""Exercise 4.2: what FSDP holds before, in and after a forward pass; bf16 against fp32."""

import gc
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jobkit.payload.model import CNN
from ranks import MIB, count_collectives, kept_for_backward, main, on_ranks

LAYERS, WIDTH = 8, 512
# Strategy as FSDP1 called it: whether FSDP2 frees the parameters after the forward pass.
STRATEGIES = {"DDP": None, "SHARD_GRAD_OP": False, "FULL_SHARD": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tensor_bytes():
    """Bytes of all tensors that Python knows and of their gradients, each storage once."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = {}
    for tensor in (*tensors, *gradients):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def settled_bytes():
    """The same once Gloo's threads have let go of theirs, a moment after a collective ends.

    Nothing computes meanwhile, so that what is held can only become less.
    """
    least = tensor_bytes()
    for _ in range(5):
        time.sleep(0.005)
        least = min(least, tensor_bytes())
    return least


def count_from_now():
    """Let tensor_bytes() count what is made from now on."""
    gc.collect()
    gc.freeze()


def layers_of(width):
    """The model: layers of the same size, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def replicate(model):
    """DDP, with the gradients in its buckets alone."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def shard(model, groups, frees=True):
    """FSDP with the layers in so many groups of neighbours."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layers, size = list(model), -(-len(model) // groups)
    if groups > 1:
        for begin in range(0, len(layers), size):
            fully_shard(layers[begin : begin + size], mesh=mesh, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, reshard_after_forward=frees)
    return model


def step_mib(wrap):
    """MiB before, at most in and after the forward pass, and after the backward pass."""
    count_from_now()
    model = layers_of(WIDTH)
    layers, seen = list(model), []
    wrapped = wrap(model)
    gc.collect()
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(settled_bytes()))
    x = torch.ones(1, WIDTH)  # one sample: activations are small beside the parameters
    before = settled_bytes()
    loss = wrapped(x).sum()
    after = settled_bytes()
    loss.backward()
    return tuple(count / MIB for count in (before, max(seen), after, settled_bytes()))


def hold(rank):
    """A row of each strategy."""
    return [
        (name, rank, *step_mib(replicate if f is None else lambda m, f=f: shard(m, LAYERS, f)))
        for name, f in STRATEGIES.items()
    ]


def forward():
    """DDP, SHARD_GRAD_OP and FULL_SHARD."""
    rows = [row for pair in zip(*on_ranks(hold), strict=True) for row in pair]
    size = WIDTH * WIDTH * 4 / MIB
    title = f"{LAYERS} layers of {size:g} MiB on two ranks: MiB of all tensors of a rank"
    head = ("before forward", "in forward", "after forward", "after backward")
    return title, ("strategy", "rank", *head), rows


def gather_in_groups(rank):
    """A row of each number of groups."""
    rows = []
    for groups in (1, 2, 4, LAYERS):
        mib = []
        counts = count_collectives(
            lambda groups=groups, mib=mib: mib.extend(step_mib(lambda m: shard(m, groups)))
        )
        kinds = ("allgather", "reducescatter")
        calls = [sum(n for name, n in counts.items() if kind in name) for kind in kinds]
        rows.append((groups, *calls, *mib[:2]))
    return rows


def groups():
    """FULL_SHARD with one group, two, four and one for each layer: what auto_wrap_policy chose."""
    title = "FULL_SHARD of the same model, by the number of groups that are gathered at once"
    head = ("groups", "all-gathers", "reduce-scatters", "before forward (MiB)", "in forward (MiB)")
    return title, head, on_ranks(gather_in_groups)[0]


def bytes_and_time():
    """A forward and backward pass of the CNN in each precision."""
    batch, steps, rows = 8, 3, []
    for name, dtype in DTYPES.items():
        torch.manual_seed(0)
        model, times = CNN(10).to(dtype), []
        x, y = torch.randn(batch, 3, 32, 32, dtype=dtype), torch.randint(10, (batch,))

        def compute(model=model, x=x, y=y):
            F.cross_entropy(model(x), y).backward()

        for _ in range(steps):
            begun = time.perf_counter()
            kept = kept_for_backward(model, compute)
            times.append(1000 * (time.perf_counter() - begun))
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        rows.append((name, parameters / MIB, kept / MIB, statistics.median(times)))
    title = f"the CNN, a batch of {batch}, forward and backward (median of {steps})"
    return title, ("precision", "parameters (MiB)", "kept for backward (MiB)", "time (ms)"), rows


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
    main(forward, groups, bytes_and_time, sums)
