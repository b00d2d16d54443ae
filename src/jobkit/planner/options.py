"""The options that `memory` and `advise` share, and how both show numbers."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobkit.errors import Parser, UsageError, whole
from jobkit.spec.options import add_spec_arguments, given_settings
from jobkit.spec.runspec import ONE_RANK, RunSpec
from jobkit.units import GIB, MIB

if TYPE_CHECKING:
    from jobkit.planner.footprints import Subject

_IMAGES = 60_000
# Settings that change neither memory nor traffic.
_SKIPPED = (
    *("repeat", "dataset", "train_samples", "test_samples", "augment", "epochs", "data_dir"),
    *("max_steps", "train_split", "check_ranks"),
    *("flip", "tta", "label_smoothing", "bias_lr_factor"),
    *("eval_batch_size", "seed", "device", "threads", "warmup_iterations", "timeout_s"),
)


def add_model_arguments(parser: Parser, skip: Sequence[str] = ()) -> None:
    """Add the settings that matter here, and two ways to say how large the model is."""
    parser.add_argument(
        "--parameters",
        type=whole(1),
        metavar="N",
        help="instead of a model: its number of parameters, as 7e9 (without activations)",
    )
    parser.add_argument(
        "--classes", type=whole(1), default=10, metavar="N", help="classes of the data (default 10)"
    )
    parser.add_argument(
        "--images",
        type=whole(0),
        metavar="N",
        help="training and test images of the data set, which stay on each GPU (default "
        f"{_IMAGES:,}, as CIFAR-10 has; 0 with --parameters)",
    )
    add_spec_arguments(parser, skip=(*_SKIPPED, *skip))


def subject_of(args: argparse.Namespace) -> "Subject":
    """The model, or the bare size. Raises UsageError for a model and a size at once."""
    if args.parameters and ("model" in args or "width" in args):
        raise UsageError("--parameters stands for a model: leave out --model and --width")
    from jobkit.planner.footprints import Subject

    images = args.images
    if images is None:
        images = 0 if args.parameters else _IMAGES
    return Subject(num_classes=args.classes, parameters=args.parameters, images=images)


def base_of(args: argparse.Namespace, nodes: int, gpus: int) -> RunSpec:
    """The settings at a number of GPUs in all, under a strategy that can use them."""
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus}: {nodes} nodes cannot have the same number each")
    given = given_settings(args)
    if given.get("strategy", "ddp") in ONE_RANK:
        given["strategy"] = "ddp"
    return RunSpec(**{**given, "nodes": nodes, "ranks_per_node": gpus // nodes})


def unit_for(largest: int) -> tuple[str, int]:
    """The unit for a table, by its largest number of bytes."""
    return ("GiB", GIB) if largest >= GIB else ("MiB", MIB)


def amount(size: int | None, unit: int) -> str:
    """Bytes in a unit, short; a dash where they are not known."""
    if not size:
        return "-" if size is None else "0"
    value = size / unit
    if value < 0.001:
        return "<0.001"
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: a mark and a name to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{text:<{width}}" if i < 2 else f"{text:>{width}}"
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
