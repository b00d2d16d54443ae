"""The memory of a rank under each strategy: what it keeps, activations, communication buffers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.payload.distributed import RankEnv
from jobkit.payload.memory import MIB, Share, fullest_of_zero1, persistent
from jobkit.payload.strategies import STRATEGIES
from jobkit.payload.strategies.fsdp import blocks_of
from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.planner.activations import fake_model, passes
from jobkit.spec.runspec import RunSpec

_CPU = torch.device("cpu")
_PIECES = 1000  # a model of which only the size is known counts as so many equal parameters
_DP_BUFFER = 10 * MIB  # torch.nn.parallel.comm.broadcast_coalesced's buffer_size


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The fullest rank's memory, in bytes. None: only the model's size is known."""

    label: str
    spec: RunSpec
    share: Share
    activations: int | None
    communication: int | None
    host: int = 0  # of share: in the node's memory instead (CPU offload)

    @property
    def total(self) -> int:
        """On the device, as far as it is known."""
        return self.share.total - self.host + (self.activations or 0) + (self.communication or 0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whose memory is asked for: a model by its number of classes, or a bare size."""

    num_classes: int = 10
    parameters: int | None = None  # the size alone, in equal pieces; no model is made

    def tensors(self, spec: RunSpec) -> tuple[list[Tensor], list[Tensor]]:
        """All parameters and buffers, without data."""
        if self.parameters is None:
            model = self.model(spec)
            return list(model.parameters()), list(model.buffers())
        pieces = min(_PIECES, self.parameters)
        size, more = divmod(self.parameters, pieces)
        sizes = (size + (i < more) for i in range(pieces))
        return [torch.empty(n, device="meta", requires_grad=True) for n in sizes], []

    def model(self, spec: RunSpec) -> nn.Module:
        """The model, of fake tensors. Raises UsageError where it cannot be made."""
        return fake_model(spec.model, spec.width, self.num_classes)[0]


def label_of(spec: RunSpec) -> str:
    """The name of a strategy with its mode, as variants has it."""
    if spec.strategy == "ddp":
        return "ddp, zero1" if spec.zero1 else "ddp"
    if spec.strategy == "fsdp" and spec.fsdp_hybrid_replicas > 1:
        return "fsdp, hybrid"
    if spec.strategy == "fsdp":
        kept = not spec.fsdp_reshard_after_forward
        return "fsdp, gradients and optimizer" if kept else "fsdp, full shard"
    return spec.strategy


def variants(base: RunSpec) -> dict[str, RunSpec]:
    """Every strategy and mode with the settings of base, by label.

    base: of any number of ranks; single and dp have one, dp with all devices of a node.
    """
    one = replace(base, nodes=1, ranks_per_node=1)
    on_a_node = replace(base, nodes=1).steps_batch_size
    if base.batch_size_per_rank is None:  # the same images for each device as with more nodes
        on_a_node = max(1, -(-base.steps_batch_size // base.nodes))
    dp = replace(one, strategy="dp", batch_size_per_rank=None, global_batch_size=on_a_node)
    whole = replace(base, strategy="fsdp", fsdp_hybrid_replicas=1)
    specs = [
        replace(one, strategy="single"),
        dp,
        replace(base, strategy="ddp", zero1=False),
        replace(base, strategy="ddp", zero1=True),
        replace(whole, fsdp_reshard_after_forward=True),
        replace(whole, fsdp_reshard_after_forward=False),
    ]
    if copies := _copies(base):
        specs.append(replace(base, strategy="fsdp", fsdp_hybrid_replicas=copies))
    specs += [replace(base, strategy=name) for name in ("mp", "pp")]
    return {label_of(spec): spec for spec in specs}


def _copies(base: RunSpec) -> int:
    """Copies of the hybrid mode: one a node, or two where there is one node; 0: none can be."""
    if base.fsdp_hybrid_replicas > 1:
        return base.fsdp_hybrid_replicas
    copies = base.nodes if base.nodes > 1 else 2
    return copies if base.world_size % copies == 0 and base.world_size > copies else 0


def images_at_once(spec: RunSpec, devices: int) -> int:
    """Images of one forward pass on the fullest device of dp, single, ddp or fsdp."""
    ranks = devices if spec.strategy == "dp" else spec.world_size
    return math.ceil(math.ceil(spec.steps_batch_size / ranks) / spec.accumulate)


def footprint(spec: RunSpec, subject: Subject, devices: int = 1) -> Footprint:
    """The fullest rank's memory under one strategy; devices: of dp.

    Raises UsageError where the strategy cannot run so.
    """
    pipeline = strategy_of(spec)
    if isinstance(pipeline, Pipeline):
        return _of_pipeline(pipeline, subject)
    parameters, buffers = subject.tensors(spec)
    zero1 = spec.strategy == "ddp" and spec.zero1
    rank = fullest_of_zero1(parameters, spec.world_size) if zero1 else 0
    share = persistent(spec, parameters, buffers, rank)
    offloads = spec.strategy == "fsdp" and spec.fsdp_cpu_offload
    activations = communication = None
    if subject.parameters is None:
        (passed,) = passes(spec, images_at_once(spec, devices), subject.num_classes)
        activations = passed.taken + passed.saved
    if spec.strategy != "fsdp":
        communication = _of_copies(spec, share, devices)
    elif subject.parameters is None:
        communication = _gathered(spec, subject.model(spec))
    elif not spec.fsdp_reshard_after_forward:  # all of them, whatever the blocks are
        communication = subject.parameters * (4 if spec.precision == "fp32" else 2)
    return Footprint(
        label=label_of(spec),
        spec=spec,
        share=share,
        activations=activations,
        communication=communication,
        host=share.total - share.buffers if offloads else 0,
    )


def strategy_of(spec: RunSpec) -> object:
    """The strategy, checked. Raises UsageError where its settings cannot be."""
    place = RankEnv(world_size=spec.world_size, local_world_size=spec.ranks_per_node)
    strategy = STRATEGIES[spec.strategy](spec, place, _CPU)
    strategy.check()
    return strategy


def _of_copies(spec: RunSpec, share: Share, devices: int) -> int:
    """Buffers of strategies that keep the model whole.

    DDP's buckets are the gradients themselves, or beside them; a hook that compresses keeps the
    compressed ones at once, PowerSGD what it left out (error feedback).
    """
    if spec.strategy == "dp":
        return min(share.parameters, _DP_BUFFER) if devices > 1 else 0
    if spec.strategy != "ddp":
        return 0
    beside = 0 if spec.ddp_gradient_as_bucket_view else share.gradients
    factor = {"none": 0.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1.0}[spec.ddp_comm_hook]
    return beside + int(factor * share.gradients)


def block_parameters(spec: RunSpec, model: nn.Module) -> tuple[list[int], int]:
    """Parameters of each block that FSDP gathers, in the model's order, and those of the root."""
    of = {id(p): "" for p in model.parameters()}
    blocks = blocks_of(model, spec)
    for name, block in blocks:  # inner after outer, and a parameter belongs to the innermost
        of.update({id(p): name for p in block.parameters()})
    sizes: Counter[str] = Counter()
    for p in model.parameters():
        sizes[of[id(p)]] += p.numel()
    return [sizes[name] for name, _ in blocks if sizes[name]], sizes[""]


def _gathered(spec: RunSpec, model: nn.Module) -> int:
    """FSDP: gathered parameters, and one block's gradients on their way.

    The root stays gathered throughout; of the blocks there are the one that computes and those
    that are gathered ahead, or all of them where they are kept after the forward pass. One
    block's gradients are whole, and once more in the input of the reduce-scatter; those that
    micro-batches add up stay whole until the last one.
    """
    blocks, root = block_parameters(spec, model)
    low = spec.precision != "fp32"
    size = 2 if low else 4
    reduced = 4 if not low or spec.fsdp_reduce_fp32 else 2
    at_once = 1 + max(1, spec.fsdp_prefetch)
    windows = [sum(blocks[i : i + at_once]) for i in range(len(blocks))]
    kept = max(windows, default=0) if spec.fsdp_reshard_after_forward else sum(blocks)
    added_up = (root + sum(blocks)) * reduced if spec.accumulate > 1 else 0
    return (root + kept) * size + max([root, *blocks]) * (size + reduced) + added_up


def _of_pipeline(pipeline: Pipeline, subject: Subject) -> Footprint:
    """The fullest rank of a pipeline: its stages, and the microbatches that it has at once."""
    found = [_of_rank(pipeline, subject, rank) for rank in range(pipeline.ranks)]
    return max(found, key=lambda each: each.total)


def _of_rank(pipeline: Pipeline, subject: Subject, rank: int) -> Footprint:
    spec = pipeline.spec
    if subject.parameters is not None:
        parameters, _ = subject.tensors(spec)
        share = persistent(spec, parameters[rank :: pipeline.ranks], [])
        return Footprint(
            label=spec.strategy, spec=spec, share=share, activations=None, communication=None
        )
    stages = _stages(pipeline, subject)
    indices = range(rank, len(stages), pipeline.ranks)
    share = persistent(
        spec,
        [p for i in indices for p in stages[i].parameters()],
        [b for i in indices for b in stages[i].buffers()],
    )
    images = -(-spec.steps_batch_size // (pipeline.data_world_size * spec.accumulate))
    passed = passes(spec, -(-images // pipeline.parts), subject.num_classes, pipeline.stages_of)
    own = [passed[i] for i in indices]
    at_once = _in_flight(pipeline, rank)
    # torch has a buffer for what each microbatch brings, going forward and backward.
    received = sum(p.taken for p in own)
    returned = sum(passed[i].given for i in indices if i < len(stages) - 1)
    flat = share.gradients if pipeline.data_world_size > 1 else 0
    return Footprint(
        label=spec.strategy,
        spec=spec,
        share=share,
        activations=sum(p.saved for p in own) * at_once // len(own),
        communication=(received + returned) * pipeline.parts + flat,
    )


def _stages(pipeline: Pipeline, subject: Subject) -> Sequence[nn.Module]:
    return pipeline.stages_of(subject.model(pipeline.spec))


def _in_flight(pipeline: Pipeline, rank: int) -> int:
    """Forward passes of a rank's stages that wait for their backward pass, at most.

    GPipe keeps every microbatch; 1F1B one for each stage from this one to the last; the
    interleaved schedule those of torch's ScheduleInterleaved1F1B, over all stages of the rank.
    """
    parts, ranks = pipeline.parts, pipeline.ranks
    if pipeline.order == "gpipe":
        return parts
    if pipeline.order == "1f1b":
        return min(parts, ranks - rank)
    on_one = pipeline.count // ranks
    rounds = max(1, parts // ranks)
    warm_up = (on_one - 1) * (parts // rounds) + 2 * (ranks - 1 - rank)
    return min(parts * on_one, warm_up + 1)


def footprints(
    base: RunSpec, subject: Subject, only: Sequence[str] | None = None
) -> tuple[list[Footprint], dict[str, str]]:
    """Each strategy's footprint, and why the others cannot run so, by label.

    only: of these labels, where they are possible.
    """
    found, refused = [], {}
    for label, spec in variants(base).items():
        if only is not None and label not in only:
            continue
        try:
            found.append(footprint(spec, subject, devices=base.ranks_per_node))
        except UsageError as error:
            refused[label] = str(error)
    return found, refused
