"""Compare every strategy with a single process: `python -m jobkit verify`.

Each strategy trains a small model from the same seed on the same global batches, in float64 and in
float32, on several ranks of this machine; losses, gradients and parameters of every step are
compared with those of `single`. Ends with 4 when one is over its tolerance. With --model it is the
user's model, on the GPUs at hand where there are any.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from jobkit.errors import Exit, Parser, UsageError, command, one_of, positive, whole
from jobkit.gpus import count_gpus, hide_gpus
from jobkit.spec.runspec import STRATEGIES

EPILOG = """examples:
  python -m jobkit verify
  python -m jobkit verify --strategies ddp fsdp --world-sizes 2 3
  python -m jobkit verify --model package.module:factory --device auto
  python -m jobkit verify --model package.module:factory --classes 100 --optimizer adamw --lr 1e-3
"""
_OF_MODEL = ("global_batch_size", "classes", "optimizer", "lr")


def parser() -> Parser:
    """The command line."""
    new = Parser(prog="jobkit verify", description=__doc__.splitlines()[0], epilog=EPILOG)
    new.add_argument(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help=f"strategies to check (default: {' '.join(STRATEGIES)}; with --model: ddp fsdp)",
    )
    new.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of ranks (default: 1 2 3 4; with --model: 2, or as many as GPUs)",
    )
    new.add_argument("--model", metavar="NAME", help="your model, as package.module:factory")
    new.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="with --model: cuda, a GPU for each rank; cpu; auto (default): GPUs if there are any",
    )
    model = new.add_argument_group("with --model")
    model.add_argument(
        "--global-batch-size", type=whole(6), metavar="N", help="samples in a step (default: 24)"
    )
    model.add_argument("--classes", type=whole(2), metavar="N", help="of the labels (default: 10)")
    model.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), help="(default: sgd)")
    model.add_argument("--lr", type=positive, metavar="X", help="learning rate (default: 0.01)")
    new.add_argument("--json", action="store_true", help="print the table as JSON")
    return new


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table; 4 when a difference is over its tolerance, 1 when a run failed."""
    args = parser().parse_args(argv)
    device = _device(args)
    if device == "cpu":
        hide_gpus()  # the ranks, which are processes of their own, compute on the CPU
    is_model = args.model is not None
    args.strategies = args.strategies or (["ddp", "fsdp"] if is_model else list(STRATEGIES))
    args.world_sizes = args.world_sizes or _sizes(is_model, device)
    for name in args.strategies:
        one_of("strategy", name, STRATEGIES)
    if min(args.world_sizes) < 1 or max(args.world_sizes) > 16:
        raise UsageError(f"--world-sizes {args.world_sizes}: each must be from 1 to 16")
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.checks.verify.cases import cases_of, plan_model
    from jobkit.checks.verify.rank import table, verify

    more: dict[str, Any] = {}
    if is_model:
        values = {k: v for k in _OF_MODEL if (v := getattr(args, k)) is not None}
        plans, more = plan_model(args.model, device, args.strategies, args.world_sizes, values)
    else:
        plans = {n: cases_of(args.strategies, n) for n in dict.fromkeys(args.world_sizes)}
    if not any(plans.values()):
        raise UsageError(f"{', '.join(args.strategies)}: no case runs on that many ranks")
    try:
        differences = verify(plans, **more)
    except RuntimeError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.FAILED
    if args.json:
        print(json.dumps([{**dataclasses.asdict(d), "ok": d.ok} for d in differences], indent=1))
    else:
        print("\n".join(table(differences)))
    return Exit.OK if all(d.ok for d in differences) else Exit.THRESHOLD


def _device(args: argparse.Namespace) -> str:
    """Where the ranks compute: cpu or cuda. UsageError for what is not possible."""
    if args.model is None:
        if args.device:
            raise UsageError("--device: without --model the check is on the CPU")
        for name in _OF_MODEL:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} has no effect without --model")
        return "cpu"
    gpus = 0 if args.device == "cpu" else count_gpus()
    if args.device == "cuda" and not gpus:
        raise UsageError("--device cuda: this machine shows no GPU (see nvidia-smi)")
    if gpus and max(args.world_sizes or [1]) > gpus:
        raise UsageError(
            f"--world-sizes {max(args.world_sizes)}: each rank needs a GPU, and this machine shows "
            f"{gpus}; take fewer, or --device cpu"
        )
    return "cuda" if gpus else "cpu"


def _sizes(is_model: bool, device: str) -> list[int]:
    """The default numbers of ranks."""
    if not is_model:
        return [1, 2, 3, 4]
    return [2] if device == "cpu" else [min(count_gpus(), 16)]


if __name__ == "__main__":
    sys.exit(main(None))
