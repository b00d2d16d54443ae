"""Compare every strategy with a single process: `python -m jobkit verify`.

Each strategy trains a small model from the same seed on the same global batches, in float64 and in
float32, on several ranks of this machine; losses, gradients and parameters of every step are
compared with those of `single`. Ends with 4 when one is over its tolerance. With --model it is the
user's model, on the GPUs at hand where there are any.
"""

import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command, whole
from jobkit.gpus import count_gpus, hide_gpus
from jobkit.spec.runspec import STRATEGIES

EPILOG = """examples:
  python -m jobkit verify
  python -m jobkit verify --strategies ddp fsdp --world-sizes 2 3
  python -m jobkit verify --model package.module:factory --device auto --classes 100
"""


def parser() -> Parser:
    new = Parser(prog="jobkit verify", description=__doc__.splitlines()[0], epilog=EPILOG)
    add = new.add_argument
    default = f"strategies to check (default: {' '.join(STRATEGIES)}; with --model: ddp fsdp)"
    add("--strategies", nargs="+", metavar="NAME", choices=STRATEGIES, help=default)
    numbers = "numbers of ranks (default: 1 2 3 4; with --model: 2, or as many as GPUs)"
    add("--world-sizes", nargs="+", type=whole(1, 16), metavar="N", help=numbers)
    add("--model", metavar="NAME", help="your model, as package.module:factory")
    device = "with --model: cuda, a GPU for each rank; cpu; auto (default): GPUs if there are any"
    add("--device", choices=("auto", "cpu", "cuda"), help=device)
    classes = "with --model: classes of the labels (default: 10)"
    add("--classes", type=whole(2), metavar="N", help=classes)
    return new


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table; 4 when a difference is over its tolerance, 1 when a run failed."""
    args = parser().parse_args(argv)
    worlds, gpus = args.world_sizes, 0
    if args.model is None and (args.device or args.classes):
        raise UsageError("--device and --classes are of --model: the check is on the CPU without")
    if args.model and args.device != "cpu":
        gpus = count_gpus()
        if args.device == "cuda" and not gpus:
            raise UsageError("--device cuda: this machine shows no GPU (see nvidia-smi)")
        if gpus and max(worlds or [1]) > gpus:
            raise UsageError(
                f"--world-sizes {max(worlds)}: each rank needs a GPU, and this machine shows "
                f"{gpus}; take fewer, or --device cpu"
            )
    if not gpus:
        hide_gpus()  # the ranks, which are processes of their own, compute on the CPU
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.checks.verify.cases import CLASSES, DTYPES, cases_of, plan_model
    from jobkit.checks.verify.rank import table, verify

    strategies, classes = args.strategies or ["ddp", "fsdp"], args.classes or CLASSES
    device, dtypes = "cuda" if gpus else "cpu", list(DTYPES)
    if args.model:
        worlds = worlds or [min(gpus, 16) or 2]
        plans, dtypes = plan_model(args.model, device, strategies, worlds, classes)
    else:
        plans = {n: cases_of(args.strategies or STRATEGIES, n) for n in worlds or (1, 2, 3, 4)}
    if not any(plans.values()):
        raise UsageError(f"{', '.join(strategies)}: no case runs on that many ranks")
    try:
        differences = verify(plans, dtypes=dtypes, device=device, classes=classes)
    except RuntimeError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.FAILED
    print("\n".join(table(differences)))
    return Exit.OK if all(d.ok for d in differences) else Exit.THRESHOLD


if __name__ == "__main__":
    sys.exit(main(None))
