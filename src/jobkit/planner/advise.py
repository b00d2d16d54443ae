"""Recommend a strategy for a model on given GPUs, with reasons.

Takes the memory of each strategy from `jobkit memory`, and the communication time of a step from
the bandwidths. Ends with 4 when nothing fits.
"""

import json
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, command, positive, whole
from jobkit.planner.options import add_model_arguments, base_of, subject_of
from jobkit.units import GIB

EPILOG = """examples:
  python -m jobkit advise --model resnet18 --device-memory 80 --gpus-per-node 4
  python -m jobkit advise --model cnn --width 32 --optimizer adamw --device-memory 16 \\
      --nodes 4 --gpus-per-node 4 --network-gb-per-s 12.5 --link-gb-per-s 200
  python -m jobkit advise --parameters 7e9 --optimizer adamw --device-memory 80 --gpus-per-node 8
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="jobkit advise",
        usage="%(prog)s --device-memory GIB [options]",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
    )
    add = made.add_argument
    add(
        "--device-memory",
        type=positive,
        required=True,
        metavar="GIB",
        help="memory of one GPU, in GiB",
    )
    add("--nodes", type=whole(1, 10**5), default=1, metavar="N", help="number of nodes (default 1)")
    add(
        "--gpus-per-node",
        type=whole(1, 1024),
        default=1,
        metavar="N",
        help="(default 1)",
    )
    add(
        *("--network-gb-per-s",),
        type=positive,
        default=25.0,
        metavar="X",
        help="network of a node, in 10^9 bytes per second each way (default 25: 200 Gbit/s)",
    )
    add(
        *("--link-gb-per-s",),
        type=positive,
        default=25.0,
        metavar="X",
        help="a GPU to the others of its node (default 25: PCIe 4.0 x16; NVLink has hundreds)",
    )
    add(
        *("--reserve",),
        type=positive,
        default=0.1,
        metavar="SHARE",
        help="part of the memory left for CUDA, NCCL and the allocator (default 0.1)",
    )
    add("--json", action="store_true", help="print the answer as JSON")
    add_model_arguments(made, skip=("strategy", *_FSDP_MODE))
    return made


_FSDP_MODE = ("fsdp_reshard_after_forward", "fsdp_hybrid_replicas")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; 4 when nothing fits."""
    args = parser().parse_args(argv)
    if args.reserve >= 1:
        raise UsageError(f"--reserve {args.reserve:g}: must be less than 1")
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.planner.advice import answer, text
    from jobkit.planner.choice import Question, choose
    from jobkit.planner.traffic import links

    question = Question(
        base=base_of(args, args.nodes, args.nodes * args.gpus_per_node),
        subject=subject_of(args),
        usable=args.device_memory * GIB * (1 - args.reserve),
        links=links(args.network_gb_per_s, args.link_gb_per_s),
    )
    options, refused = question.options()
    if not options:
        raise UsageError(next(iter(refused.values())))
    taken = choose(options)
    if args.json:
        print(json.dumps(answer(question, options, refused, taken), indent=1))
    else:
        print("\n".join(text(question, options, refused, taken)))
    return Exit.OK if taken else Exit.THRESHOLD


if __name__ == "__main__":
    sys.exit(main(None))
