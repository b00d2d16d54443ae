"""Compare every strategy with a single process: `python -m jobkit verify`.

Each strategy trains a small model from the same seed on the same global batches, in float64 and in
float32, on several ranks of this machine; losses, gradients and parameters of every step are
compared with those of `single`. Ends with 4 when one is over its tolerance.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command, one_of
from jobkit.gpus import hide_gpus
from jobkit.spec.runspec import STRATEGIES

EPILOG = """examples:
  python -m jobkit verify
  python -m jobkit verify --strategies ddp fsdp --world-sizes 2 3
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="jobkit verify", description=__doc__.splitlines()[0], epilog=EPILOG)
    made.add_argument(
        "--strategies",
        nargs="+",
        metavar="NAME",
        default=list(STRATEGIES),
        help=f"strategies to check (default: {' '.join(STRATEGIES)})",
    )
    made.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        metavar="N",
        default=[1, 2, 3, 4],
        help="numbers of ranks (default: 1 2 3 4)",
    )
    made.add_argument("--json", action="store_true", help="print the table as JSON")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table; 4 when a difference is over its tolerance, 1 when a run failed."""
    args = parser().parse_args(argv)
    hide_gpus()  # the ranks, which are processes of their own, compute on the CPU
    for name in args.strategies:
        one_of("strategy", name, STRATEGIES)
    if min(args.world_sizes) < 1 or max(args.world_sizes) > 16:
        raise UsageError(f"--world-sizes {args.world_sizes}: each must be from 1 to 16")
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.checks.verify.cases import chosen
    from jobkit.checks.verify.start import table, verify

    plans = {n: chosen(args.strategies, n) for n in dict.fromkeys(args.world_sizes)}
    if not any(plans.values()):
        raise UsageError(f"{', '.join(args.strategies)}: no case runs on that many ranks")
    try:
        found = verify(plans)
    except RuntimeError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.FAILED
    if args.json:
        print(json.dumps([{**dataclasses.asdict(d), "ok": d.ok} for d in found], indent=1))
    else:
        print("\n".join(table(found)))
    return Exit.OK if all(d.ok for d in found) else Exit.THRESHOLD


if __name__ == "__main__":
    sys.exit(main(None))
