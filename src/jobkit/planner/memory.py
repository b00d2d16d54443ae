"""Predict the memory per GPU under each strategy.

Nothing is trained and no GPU is needed. Parameters, gradients and optimizer state are arithmetic;
the passes of a step are followed on tensors without data.
"""

import argparse
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.spec.options import add_spec_arguments, chosen_settings
from jobkit.spec.runspec import ONE_RANK, RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.units import GIB, MIB

EPILOG = """examples:
  python -m jobkit memory --model cnn --width 8 --strategy fsdp --gpus 8 --optimizer adamw \\
      --precision bf16 --batch-size-per-rank 256
  python -m jobkit memory --parameters 7e9 --optimizer adamw --gpus 8
  python -m jobkit memory --model my_models:vit --gpus 16 --nodes 4
"""
_IMAGES = 60_000  # of CIFAR-10
# Settings that change neither memory nor traffic.
_SKIPPED = (
    *("repeat", "dataset", "train_samples", "test_samples", "augment", "epochs", "data_dir"),
    *("max_steps", "train_split", "check_ranks"),
    *("eval_batch_size", "seed", "device", "threads", "warmup_iterations", "timeout_s"),
)


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


def head(base: RunSpec, classes: int, parameters: int | None = None) -> str:
    """What a table is of: the model of base, or any model of so many parameters."""
    name, images = "a model", ""
    if parameters is None:
        from jobkit.planner.footprint import model_of

        name = base.model
        parameters = sum(p.numel() for p in model_of(base, classes).parameters())
        name += f", width {base.width}" if base.width > 1 else ""
        images = f", {-(-base.steps_batch_size // base.world_size)} images per step on each"
    precision = base.precision if base.precision != "auto" else "fp32"  # takes the most memory
    ranks = f"{base.world_size} GPU{'s' * (base.world_size > 1)}"
    nodes = f" on {base.nodes} nodes" if base.nodes > 1 else ""
    of = f"{parameters:,} parameters, {base.optimizer}, {precision}, {ranks}{nodes}"
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
    args = parser().parse_args(argv)
    if args.parameters and ("model" in args or "width" in args):
        raise UsageError("--parameters stands for a model: leave out --model and --width")
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.planner.footprint import PARTS, Subject, footprints

    images = 0 if args.parameters else args.images
    subject = Subject(classes=args.classes, images=images, parameters=args.parameters)
    base = base_of(args, args.nodes, args.gpus)
    label = getattr(args, "strategy", "ddp")
    if label == base.strategy:
        label = FACTS[label].label(base.to_dict())
    possible, refused = footprints(base, subject)
    if label in refused or not possible:
        raise UsageError(refused.get(label) or next(iter(refused.values())))
    large = max(footprint.total for footprint in possible) >= GIB
    name, unit = ("GiB", GIB) if large else ("MiB", MIB)
    rows = [["", f"{name} (maximum over ranks)", *PARTS, "total"]]
    for each in possible:
        sizes = [amount(getattr(each, part), unit) for part in (*PARTS, "total")]
        rows.append(["*" * (each.label == label), each.label, *sizes])
    print("\n".join([head(base, args.classes, args.parameters), "", *text_table(rows), _NOTES]))
    if any(each.activations is None for each in possible):
        print("  -: needs a model; of this one only the size is known.")
    if any(each.offloaded for each in possible):
        print("  --fsdp-cpu-offload: what fsdp keeps is on the host; total leaves it out.")
    for name, why in refused.items():
        print(f"  {name}: not applicable: {why}")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(None))
