"""`python -m jobkit memory`: the memory of a training under each strategy.

Nothing is trained and no GPU is needed: parameters, gradients and optimizer state follow from the
shapes of the model's tensors, activations from a forward pass of tensors without data.
"""

import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.payload.memory import MIB
from jobkit.planner.footprints import Footprint, Subject, footprints, label_of
from jobkit.planner.options import (
    add_model_arguments,
    amount,
    base_of,
    subject_of,
    text_table,
    unit_for,
)
from jobkit.spec.runspec import RunSpec

EPILOG = """examples:
  python -m jobkit memory --model cnn --width 8 --strategy fsdp --gpus 8 --optimizer adamw \\
      --precision bf16 --batch-size-per-rank 256
  python -m jobkit memory --parameters 7e9 --optimizer adamw --gpus 8
  python -m jobkit memory --model my_models:vit --gpus 16 --nodes 4 --json
"""
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication", "data")


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="jobkit memory",
        usage="%(prog)s [options]",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
    )
    made.add_argument(
        "--gpus", type=whole(1, 10**6), default=1, metavar="N", help="ranks in all (default 1)"
    )
    made.add_argument(
        "--nodes", type=whole(1, 10**6), default=1, metavar="N", help="nodes (default 1)"
    )
    how = made.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the table as JSON, in MiB")
    how.add_argument("--csv", action="store_true", help="print the table as CSV, in MiB")
    add_model_arguments(made)
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    args = parser().parse_args(argv)
    subject, base = subject_of(args), base_of(args, args.nodes, args.gpus)
    asked = getattr(args, "strategy", "ddp")
    asked = asked if asked != base.strategy else label_of(base)
    found, refused = footprints(base, subject)
    if asked in refused:
        raise UsageError(refused[asked])
    if not found:
        raise UsageError(next(iter(refused.values())))
    if args.json:
        print(json.dumps([{**row(each), "asked": each.label == asked} for each in found], indent=1))
    elif args.csv:
        rows = [row(each) for each in found]
        writer = csv.DictWriter(sys.stdout, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print("\n".join([*head(base, subject), "", *table(found, asked), *notes(found, refused)]))
    return Exit.OK


def sizes(each: Footprint) -> dict[str, int | None]:
    """The parts of a footprint and their sum, in bytes."""
    share = each.share
    kept = (share.parameters, share.gradients, share.optimizer, share.buffers)
    parts = zip(PARTS, (*kept, each.activations, each.communication, each.data), strict=True)
    return {**dict(parts), "total": each.total}


def row(each: Footprint) -> dict[str, Any]:
    """A footprint for programs, in MiB."""
    known = {
        f"{name}_mib": None if size is None else size / MIB for name, size in sizes(each).items()
    }
    return {"strategy": each.label, **known, "offloaded_to_host_mib": each.host / MIB}


def head(base: RunSpec, subject: Subject) -> list[str]:
    """What the table is of."""
    count = sum(p.numel() for p in subject.tensors(base)[0])
    name = "a model" if subject.parameters else base.model
    wide = f", width {base.width}" if base.width > 1 else ""
    each = -(-base.steps_batch_size // base.world_size)
    batch = "" if subject.parameters else f", {each} images per step on each"
    ranks = f"{base.world_size} GPU{'s' * (base.world_size > 1)}"
    nodes = f" on {base.nodes} nodes" if base.nodes > 1 else ""
    of = f"{count:,} parameters, {base.optimizer}, {base.precision}"
    return [f"{name}{wide}: {of}, {ranks}{nodes}{batch}"]


def table(found: Sequence[Footprint], asked: str) -> list[str]:
    """The footprints for a reader, one line each; a star at the one asked for."""
    unit, size = unit_for(max(each.total for each in found))
    rows = [["", f"{unit} (maximum over ranks)", *PARTS, "total"]]
    for each in found:
        numbers = [amount(n, size) for n in sizes(each).values()]
        rows.append(["*" if each.label == asked else "", each.label, *numbers])
    return text_table(rows)


def notes(found: Sequence[Footprint], refused: dict[str, str]) -> list[str]:
    """What the reader must know of the numbers."""
    lines = [
        "",
        "* the strategy asked for. 1 GiB = 1024 MiB = 2^30 bytes. Gradients are those just before",
        "  the optimizer's step. Not counted: the CUDA context, NCCL, workspaces of kernels, and",
        "  what the allocator reserves beyond. DDP's buckets are the gradients (unless",
        "  --no-ddp-gradient-as-bucket-view); FSDP gathers blocks, pp and mp receive activations.",
        "  data: the images of the data set (--images), which stay on each GPU, and their crops.",
    ]
    if any(each.activations is None for each in found):
        lines.append("  -: needs a model; of this one only the size is known.")
    if any(each.host for each in found):
        lines.append("  --fsdp-cpu-offload: what fsdp keeps is on the host; total leaves it out.")
    return [*lines, *(f"  {label}: not applicable: {why}" for label, why in refused.items())]


if __name__ == "__main__":
    sys.exit(main(None))
