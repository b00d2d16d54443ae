"""What `memory` and `advise` are both told: the model, its training, and how numbers are shown."""

import argparse
import math
from collections.abc import Callable, Sequence

from jobkit.errors import Parser, UsageError
from jobkit.payload.memory import GIB, MIB
from jobkit.planner.footprints import Subject
from jobkit.spec.options import add_spec_arguments, given_settings
from jobkit.spec.runspec import ONE_RANK, RunSpec

# Settings that change neither memory nor traffic.
_SKIPPED = (
    *("repeat", "dataset", "train_samples", "test_samples", "augment", "epochs", "data_dir"),
    *("eval_batch_size", "seed", "device", "threads", "warmup_iterations", "timeout_s"),
)


def whole(least: int, most: int = 10**15) -> Callable[[str], int]:
    """A converter for argparse: a whole number, also written as 7e9."""

    def convert(text: str) -> int:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value == int(value)):
            raise argparse.ArgumentTypeError(f"'{text}': must be a whole number, {least} or more")
        return int(value)

    return convert


def positive(text: str) -> float:
    """A converter for argparse: a number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': must be a number over 0")
    return value


def add_model_arguments(parser: Parser, skip: Sequence[str] = ()) -> None:
    """The settings of the training that count here, and two ways to say how large the model is."""
    parser.add_argument(
        "--parameters",
        type=whole(1),
        metavar="N",
        help="instead of a model: so many parameters, as 7e9 (activations are left out then)",
    )
    parser.add_argument(
        "--classes", type=whole(1), default=10, metavar="N", help="classes of the data (default 10)"
    )
    add_spec_arguments(parser, skip=(*_SKIPPED, *skip))


def subject_of(args: argparse.Namespace) -> Subject:
    """Whose memory is asked for. Raises UsageError for a model and a size at once."""
    if args.parameters and ("model" in args or "width" in args):
        raise UsageError("--parameters stands for a model: leave out --model and --width")
    return Subject(num_classes=args.classes, parameters=args.parameters)


def base_of(args: argparse.Namespace, nodes: int, gpus: int) -> RunSpec:
    """The settings at so many GPUs in all, under a strategy that may have them."""
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
