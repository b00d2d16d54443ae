"""Predict the memory per GPU under each strategy.

Nothing is trained and no GPU is needed. Parameters, gradients and optimizer state are arithmetic;
the passes of a step are followed on tensors without data.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.spec.options import add_spec_arguments, chosen_settings
from jobkit.spec.runspec import ONE_RANK, RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.units import GIB, MIB

if TYPE_CHECKING:
    from jobkit.planner.activations import Stage

EPILOG = """examples:
  python -m jobkit memory --model cnn --width 8 --strategy fsdp --gpus 8 --optimizer adamw \\
      --precision bf16 --batch-size-per-rank 256
  python -m jobkit memory --parameters 7e9 --optimizer adamw --gpus 8
  python -m jobkit memory --model my_models:vit --gpus 16 --nodes 4
"""
_IMAGES = 60_000  # of CIFAR-10
_FP32 = 4  # bytes
# Settings that change neither memory nor traffic.
_SKIPPED = (
    *("repeat", "dataset", "train_samples", "test_samples", "augment", "epochs", "data_dir"),
    *("max_steps", "train_split", "check_ranks"),
    *("eval_batch_size", "seed", "device", "threads", "warmup_iterations", "timeout_s"),
)
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication", "data")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whose memory it is: a model by its number of classes, or a bare number of parameters."""

    classes: int = 10
    images: int = 0  # of the data set, which stays on each GPU
    parameters: int | None = None  # no model is made


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on the GPU that has most. None: unknown, as only the model's size is known."""

    spec: RunSpec
    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    activations: int | None = None
    communication: int | None = None
    data: int = 0
    offloaded: int = 0  # of these bytes, in the node's memory instead

    @property
    def label(self) -> str:
        """The strategy with its mode."""
        return FACTS[self.spec.strategy].label(self.spec.to_dict())

    @property
    def total(self) -> int:
        """All that is known."""
        return sum(getattr(self, part) or 0 for part in PARTS) - self.offloaded


def footprint(spec: RunSpec, subject: Subject, devices: int = 1) -> Footprint:
    """The memory of the GPU that has most under a strategy; devices: the GPUs of dp.

    Raises UsageError where the strategy is not applicable.
    """
    facts, strategy = FACTS[spec.strategy], strategy_of(spec)
    shards = facts.shards(spec.to_dict())
    if subject.parameters is not None:
        size = _FP32 * subject.parameters
        unknown = facts.splits_model or (facts.shards_state and spec.fsdp_reshard_after_forward)
        sent = None if unknown else size if facts.shards_state else 0
        return _footprint(spec, -(-size // shards), -(-size // shards), communication=sent)
    if facts.splits_model:
        ranks = range(strategy.ranks)
        stages = follow_stages(strategy, subject)
        found = [_of_pipeline_rank(strategy, subject, stages, rank) for rank in ranks]
        return max(found, key=lambda footprint: footprint.total)
    from jobkit.planner.activations import follow

    step_images = -(-spec.steps_batch_size // (devices if facts.whole_node else spec.world_size))
    images, added_up = -(-step_images // spec.accumulate), spec.accumulate > 1
    new = not (added_up or facts.keeps_gradients or facts.shards_state)
    (stage,) = follow(spec, images, subject.classes, new)
    parameters, gradients = -(-stage.parameters // shards), -(-stage.gradients // shards)
    activations, communication = stage.taken + stage.peak, 0
    if facts.shards_state:
        gathered, group, largest = _gathered(spec, subject)
        # A group's gradients are there whole before they are reduced to shards; those that
        # microbatches add up stay whole.
        communication = gathered + max(0, (stage.gradients if added_up else group) - gradients)
        activations -= 0 if added_up else largest
    elif facts.keeps_gradients:
        # A hook that compresses keeps its results beside the buckets; gradients that microbatches
        # add up without a reduction are beside them, too.
        beside = {"none": 0.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1.0}[spec.ddp_comm_hook]
        communication = int(gradients * (beside + added_up))
    return _footprint(
        spec,
        parameters,
        gradients,
        buffers=stage.buffers,
        activations=activations,
        communication=communication,
        data=_data(subject, step_images * (devices if facts.whole_node else 1)),
    )


def _footprint(spec: RunSpec, parameters: int, gradients: int, **parts: Any) -> Footprint:
    """With the optimizer's state: SGD keeps one number for each momentum, Adam two."""
    copies = 2 if spec.optimizer != "sgd" else int(spec.momentum > 0)
    optimizer = (copies + spec.speed_run) * gradients
    if spec.fsdp_cpu_offload and FACTS[spec.strategy].shards_state:
        parts["offloaded"] = parameters + gradients + optimizer
    sizes = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return Footprint(spec=spec, **sizes, **parts)


def _data(subject: Subject, step_images: int) -> int:
    from jobkit.payload.batches import data_bytes

    return data_bytes(subject.images, step_images) if subject.images else 0


def _gathered(spec: RunSpec, subject: Subject) -> tuple[int, int, int]:
    """Bytes of FSDP's gathered parameters, and gradients of its largest group and parameter.

    The root stays gathered; of the blocks there are the one that computes and those gathered ahead,
    or all of them where they are kept after the forward pass.
    """
    from jobkit.payload.strategies.fsdp import shard_groups
    from jobkit.planner.activations import fake_model

    model, _ = fake_model(spec.model, spec.width, spec.hidden, subject.classes)
    groups = shard_groups(model, spec)
    root = sum(g.parameters for g in groups if g.root or g.exact)
    blocks = [g.parameters for g in reversed(groups) if not (g.root or g.exact)]
    at_once = 1 + max(1, spec.fsdp_prefetch)
    kept = sum(blocks)
    if spec.fsdp_reshard_after_forward:
        kept = max((sum(blocks[i : i + at_once]) for i in range(len(blocks))), default=0)
    size = 2 if spec.low_precision else 4
    # Its parameters are free again when a group is reduced, in fp32 where that is set.
    reduced = 4 if spec.fsdp_reduce_fp32 else size
    largest = max(p.numel() for p in model.parameters())
    return (root + kept) * size, max([root, *blocks]) * reduced, largest * size


def _of_pipeline_rank(
    strategy: Any, subject: Subject, stages: "Sequence[Stage]", rank: int
) -> Footprint:
    """One rank of a pipeline."""
    spec, here, last = strategy.spec, strategy.stages_here(rank), strategy.num_stages - 1
    own = [stages[i] for i in here]
    gradients = sum(stage.gradients for stage in own)
    # torch has a buffer for what each microbatch receives, going forward and backward.
    received = sum(stages[i].taken + stages[i].given * (i < last) for i in here)
    # Forward passes that wait for their backward pass, at most: GPipe keeps every microbatch; 1F1B
    # one for each stage from this one to the last; the interleaved schedule those of torch's
    # ScheduleInterleaved1F1B, over all stages of the rank.
    parts, later = strategy.microbatches, strategy.ranks - 1 - rank
    in_turns = (len(own) - 1) * strategy.ranks + 2 * later + 1
    waiting = {"gpipe": parts, "1f1b": later + 1}.get(strategy.schedule, in_turns)
    waiting = min(parts * len(own), waiting) - 1
    saved = sum(stage.saved for stage in own) // len(own)
    return _footprint(
        spec,
        sum(stage.parameters for stage in own),
        gradients,
        buffers=sum(stage.buffers for stage in own),
        activations=waiting * saved + max(stage.peak for stage in own),
        communication=received * parts + gradients * (strategy.data_world_size > 1),
        data=_data(subject, -(-spec.steps_batch_size // strategy.data_world_size)),
    )


def follow_stages(strategy: Any, subject: Subject) -> "list[Stage]":
    """The passes of a pipeline's stages over one microbatch."""
    from jobkit.planner.activations import follow

    spec = strategy.spec
    parts = strategy.data_world_size * spec.accumulate * strategy.microbatches
    images = -(-spec.steps_batch_size // parts)
    return follow(spec, images, subject.classes, new=False, cut=strategy.stages_of)


def strategy_of(spec: RunSpec) -> Any:
    """The strategy, checked. Raises UsageError where its settings cannot be."""
    import torch

    from jobkit.payload.place import RankEnv
    from jobkit.payload.strategies import strategy_class

    place = RankEnv(world_size=spec.world_size, local_world_size=spec.ranks_per_node)
    strategy = strategy_class(spec.strategy)(spec, place, torch.device("cpu"))
    strategy.check()
    return strategy


def footprints(
    base: RunSpec, subject: Subject, strategies: Sequence[str] = tuple(FACTS)
) -> tuple[list[Footprint], dict[str, str]]:
    """Each strategy and mode with the settings of base, and by label why others are impossible.

    base: of any number of ranks; single and dp have one, dp with all devices of a node.
    """
    found, refused = [], {}
    for name in strategies:
        facts, start = FACTS[name], base
        if facts.one_rank:
            changes: dict[str, Any] = {"nodes": 1, "ranks_per_node": 1, "strategy": name}
            if facts.whole_node:  # the same images for each device as with more nodes
                whole = -(-base.steps_batch_size // base.nodes)
                changes |= {"batch_size_per_rank": None, "global_batch_size": whole}
            start = replace(base, **changes)
        for label, mode in facts.modes(start.to_dict()).items():
            try:
                spec = replace(start, strategy=name, **mode)
                found.append(footprint(spec, subject, devices=base.ranks_per_node))
            except UsageError as error:
                refused[label] = str(error)
    return found, refused


def add_model_arguments(parser: Parser, skip: Sequence[str] = ()) -> None:
    """Add the settings that matter here, and the size of the data."""
    classes = "classes of the data (default 10)"
    parser.add_argument("--classes", type=whole(1), default=10, metavar="N", help=classes)
    images = "training and test images of the data set, which stay on each GPU (default "
    images += f"{_IMAGES:,}, as CIFAR-10 has)"
    parser.add_argument("--images", type=whole(0), default=_IMAGES, metavar="N", help=images)
    add_spec_arguments(parser, skip=(*_SKIPPED, *skip))


def base_of(args: argparse.Namespace, nodes: int, gpus: int) -> RunSpec:
    """The settings at a number of GPUs in all, under a strategy that can use them."""
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus}: {nodes} nodes cannot have the same number each")
    given = chosen_settings(args)
    if given.get("strategy", "ddp") in ONE_RANK:
        given["strategy"] = "ddp"
    return RunSpec(**{**given, "nodes": nodes, "ranks_per_node": gpus // nodes})


def head(base: RunSpec, subject: Subject) -> str:
    """What a table is of."""
    name, count, images = "a model", subject.parameters, ""
    if count is None:
        from jobkit.planner.activations import fake_model

        model, _ = fake_model(base.model, base.width, base.hidden, subject.classes)
        name, count = base.model, sum(p.numel() for p in model.parameters())
        name += f", width {base.width}" if base.width > 1 else ""
        images = f", {-(-base.steps_batch_size // base.world_size)} images per step on each"
    precision = base.precision if base.precision != "auto" else "fp32"  # takes the most memory
    ranks = f"{base.world_size} GPU{'s' * (base.world_size > 1)}"
    nodes = f" on {base.nodes} nodes" if base.nodes > 1 else ""
    of = f"{count:,} parameters, {base.optimizer}, {precision}, {ranks}{nodes}"
    return f"{name}: {of}{images}"


def amount(size: int | None, unit: int) -> str:
    """Bytes in a unit, short; a dash where they are not known."""
    return "-" if size is None else "<0.001" if 0 < size < unit / 1000 else f"{size / unit:,.3g}"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: a mark and a name to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return [form.format(*row) for row in rows]


_NOTES = """
* the requested strategy. 1 GiB = 1024 MiB = 2^30 bytes. activations: what a step's passes take at
  their peak, beside the gradients. communication: what FSDP gathers, what pp and mp receive, what a
  hook of DDP compresses. data: the images of the data set (--images), which stay on each GPU.
  Not counted: the CUDA context, NCCL, workspaces of kernels, and what the allocator reserves."""


def parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="jobkit memory",
        usage="%(prog)s [options]",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
    )
    add, number = parser.add_argument, whole(1, 10**6)
    add("--gpus", type=number, default=1, metavar="N", help="number of ranks (default 1)")
    add("--nodes", type=number, default=1, metavar="N", help="number of nodes (default 1)")
    size = "instead of a model: its number of parameters, as 7e9 (without activations and data)"
    add("--parameters", type=whole(1), metavar="N", help=size)
    add_model_arguments(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    args = parser().parse_args(argv)
    if args.parameters and ("model" in args or "width" in args):
        raise UsageError("--parameters stands for a model: leave out --model and --width")
    images = 0 if args.parameters else args.images
    subject = Subject(classes=args.classes, images=images, parameters=args.parameters)
    base = base_of(args, args.nodes, args.gpus)
    label = getattr(args, "strategy", "ddp")
    if label == base.strategy:
        label = FACTS[label].label(base.to_dict())
    found, refused = footprints(base, subject)
    if label in refused or not found:
        raise UsageError(refused.get(label) or next(iter(refused.values())))
    large = max(footprint.total for footprint in found) >= GIB
    name, unit = ("GiB", GIB) if large else ("MiB", MIB)
    rows = [["", f"{name} (maximum over ranks)", *PARTS, "total"]]
    for each in found:
        sizes = [amount(getattr(each, part), unit) for part in (*PARTS, "total")]
        rows.append(["*" * (each.label == label), each.label, *sizes])
    print("\n".join([head(base, subject), "", *text_table(rows), _NOTES]))
    if any(each.activations is None for each in found):
        print("  -: needs a model; of this one only the size is known.")
    if any(each.offloaded for each in found):
        print("  --fsdp-cpu-offload: what fsdp keeps is on the host; total leaves it out.")
    for name, why in refused.items():
        print(f"  {name}: not applicable: {why}")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(None))
