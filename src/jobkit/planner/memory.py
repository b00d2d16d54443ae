"""Predict the memory per GPU under each strategy.

Nothing is trained and no GPU is needed: parameters, gradients and optimizer state follow from the
shapes of the model's tensors, activations from a forward pass of tensors without data.
"""

import csv
import json
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.planner.options import add_model_arguments, base_of, subject_of

EPILOG = """examples:
  python -m jobkit memory --model cnn --width 8 --strategy fsdp --gpus 8 --optimizer adamw \\
      --precision bf16 --batch-size-per-rank 256
  python -m jobkit memory --parameters 7e9 --optimizer adamw --gpus 8
  python -m jobkit memory --model my_models:vit --gpus 16 --nodes 4 --json
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="jobkit memory",
        usage="%(prog)s [options]",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
    )
    made.add_argument(
        "--gpus", type=whole(1, 10**6), default=1, metavar="N", help="number of ranks (default 1)"
    )
    made.add_argument(
        "--nodes", type=whole(1, 10**6), default=1, metavar="N", help="number of nodes (default 1)"
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
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.planner.footprints import footprints, label_of
    from jobkit.planner.memory_table import head, notes, row, table

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


if __name__ == "__main__":
    sys.exit(main(None))
