"""FSDP's shard groups: whose parameters are gathered together, and whose gradients are reduced.

A rank waits for the others at each gather and each reduction, however small it is. So neighbouring
blocks are merged until a group has at least --fsdp-group-mib, which is about what a link carries
in the time of its latency; a model with no more than one such group is one group, the root's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from jobkit.errors import UsageError
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import ModelSize
from jobkit.units import MIB

Blocks = list[tuple[str, nn.Module]]
_FP32 = 4  # bytes


@dataclass(frozen=True)
class ShardGroup:
    """Some modules, without those of groups inside of them."""

    name: str
    modules: tuple[nn.Module, ...]
    kept: bool = False  # the backward pass begins with its parameters: they stay gathered
    root: bool = False  # what is left of the model; it stays gathered, too
    exact: bool = False  # computes in fp32 at any precision


Sizes = list[tuple[ShardGroup, int]]


def shard_groups(model: nn.Module, spec: RunSpec) -> list[ShardGroup]:
    """The groups as torch must be given them: what is inside comes first, the root last.

    Raises UsageError for a class of --fsdp-wrap that the model does not have.
    """
    norms = tuple(m for m in model.modules() if spec.low_precision and _is_normalisation(m))
    blocks = [(n, m) for n, m in blocks_of(model, spec) if not any(m is norm for norm in norms)]
    if spec.fsdp_wrap is not None:
        found = [ShardGroup(name, (module,)) for name, module in blocks]
    else:
        found = _merged(blocks, spec)
    # One for all of them: of each a group would be the smallest of messages.
    inner = [ShardGroup("batch normalisation", norms, kept=True, exact=True)] if norms else []
    return [*inner, *reversed(found), ShardGroup("root", (model,), root=True)]


def _merged(blocks: Blocks, spec: RunSpec) -> list[ShardGroup]:
    """Neighbouring blocks in groups, in the model's order; none where one group has them all."""
    least = spec.fsdp_group_mib * MIB
    found: list[Blocks] = [[]]
    for block in blocks:
        if found[-1] and (spec.fsdp_group_mib == 0 or _bytes(found[-1]) >= least):
            found.append([])
        found[-1].append(block)
    if spec.fsdp_group_mib and len(found) > 1 and _bytes(found[-1]) < least:
        found[-2:] = [found[-2] + found[-1]]
    if not found[0] or (spec.fsdp_group_mib and len(found) == 1):
        return []
    last = len(found) - 1
    return [
        ShardGroup(_name(each), tuple(m for _, m in each), kept=i == last)
        for i, each in enumerate(found)
    ]


def _name(blocks: Blocks) -> str:
    first, last = blocks[0][0], blocks[-1][0]
    return first if len(blocks) == 1 else f"{first} to {last}"


def _bytes(blocks: Blocks) -> int:
    return sum(parameters_of(module) for _, module in blocks) * _FP32


def _is_normalisation(module: nn.Module) -> bool:
    """Batch normalisation keeps fp32 in any precision: its statistics need it, and so must weights.

    As in torch's first FSDP, which left these modules out of mixed precision.
    """
    return isinstance(module, _BatchNorm) and any(True for _ in module.parameters())


def blocks_of(model: nn.Module, spec: RunSpec) -> Blocks:
    """The modules that can be sharded on their own, by name, in the model's order.

    The direct children, or with --fsdp-wrap the modules of these classes, outer before inner.
    """
    if spec.fsdp_wrap is None:
        return [(n, m) for n, m in _children(model) if parameters_of(m)]
    inside = [(n, m) for n, m in model.named_modules() if n]
    known = {type(m).__name__ for _, m in inside}
    wanted = {word.strip() for word in spec.fsdp_wrap.split(",")}
    for name in sorted(wanted - known):
        raise UsageError(
            f"--fsdp-wrap: the model has no module of class '{name}' "
            f"(it has: {', '.join(sorted(known))})"
        )
    return [(n, m) for n, m in inside if type(m).__name__ in wanted and parameters_of(m)]


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The direct children; of a list of modules, which is never called itself, its own."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", module) for inner, module in _children(child))
        else:
            yield name, child


def parameters_of(module: nn.Module) -> int:
    """Parameters of a module, all shards together."""
    return sum(p.numel() for p in module.parameters())


def sizes(model: nn.Module, spec: RunSpec) -> Sizes:
    """The groups as shard_groups has them, with the number of parameters of each."""
    taken: set[int] = set()
    found = []
    for group in shard_groups(model, spec):
        own = {id(p): p.numel() for m in group.modules for p in m.parameters()}
        found.append((group, sum(n for key, n in own.items() if key not in taken)))
        taken |= own.keys()
    return found


def model_size(groups: Sizes) -> ModelSize:
    """What of the model decides FSDP's traffic. A group without parameters sends nothing."""
    counted = [(group.kept or group.root, _FP32 * count) for group, count in groups if count]
    return ModelSize(
        parameters=sum(size for _, size in counted),
        shard_groups=tuple(size for kept, size in counted if not kept),
        kept_groups=tuple(size for kept, size in counted if kept),
    )
