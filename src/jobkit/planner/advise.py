"""`python -m jobkit advise`: which strategy to take for a model on given GPUs, and why.

Takes the memory of each strategy from `jobkit memory`, and the communication time of a step from
the bandwidths. Ends with 4 when nothing fits, and says what would.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence

from jobkit.errors import Exit, Parser, UsageError, command, positive, whole
from jobkit.payload.memory import GIB
from jobkit.planner.choice import Option, Question, choose, command_line, reasons, remedies
from jobkit.planner.memory import head, row
from jobkit.planner.options import add_model_arguments, amount, base_of, subject_of, text_table
from jobkit.planner.traffic import duration, links

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
    add("--device-memory", type=positive, required=True, metavar="GIB", help="of one GPU, in GiB")
    add("--nodes", type=whole(1, 10**5), default=1, metavar="N", help="nodes (default 1)")
    add("--gpus-per-node", type=whole(1, 1024), default=1, metavar="N", help="(default 1)")
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
    add_model_arguments(made, skip=("strategy", "zero1", *_FSDP_MODE))
    return made


_FSDP_MODE = ("fsdp_reshard_after_forward", "fsdp_hybrid_replicas")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; 4 when nothing fits."""
    args = parser().parse_args(argv)
    if args.reserve >= 1:
        raise UsageError(f"--reserve {args.reserve:g}: must be less than 1")
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


def answer(
    question: Question, options: list[Option], refused: dict[str, str], taken: Option | None
) -> dict[str, object]:
    """The advice for a program."""
    return {
        "strategy": taken.label if taken else None,
        "command": command_line(taken.footprint.spec, question.subject) if taken else None,
        "why": reasons(taken, options) if taken else [],
        "remedies": [] if taken else list(remedies(question)),
        "usable_mib": question.usable / 2**20,
        "options": [
            {
                **row(o.footprint),
                "fits": o.fits,
                "communication_s": None if math.isnan(o.seconds) else o.seconds,
                "idle_share": o.idle,
            }
            for o in options
        ],
        "refused": refused,
    }


def text(
    question: Question, options: list[Option], refused: dict[str, str], taken: Option | None
) -> list[str]:
    """The advice for a reader."""
    lines = [*head(question.base, question.subject), *_table(options, question, taken)]
    lines += [f"   {label}: not applicable: {why}" for label, why in refused.items()]
    lines += [
        "   communication: ring estimate at these bandwidths for one optimizer step; part of it is",
        "   overlapped with computation. idle: part of a step that a GPU waits for other stages.",
    ]
    if question.subject.parameters is not None:
        lines.append(
            "   not included, as only the size is known: activations, and what full shard gathers"
        )
    lines.append("")
    if taken is None:
        wanted = f"{question.usable / GIB:.3g} GiB"
        return [*lines, f"nothing fits into {wanted}. What would:", *_points(remedies(question))]
    used = taken.footprint.total / question.usable
    return [
        *lines,
        f"take: {taken.label}",
        *_points(reasons(taken, options)),
        *_points([f"it takes {used:.0%} of the memory that may be used on each GPU"]),
        "run:",
        f"  {command_line(taken.footprint.spec, question.subject)}",
    ]


def _points(lines: Iterable[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def _table(options: list[Option], question: Question, taken: Option | None) -> list[str]:
    """The costs of each strategy, one line each; a star at the one to take."""
    rows = [
        ["", "strategy", f"GiB of {question.usable / GIB:.3g}", "fits", "communication", "idle"]
    ]
    for o in options:
        used = amount(o.footprint.total, GIB)
        star = "*" if o is taken else ""
        rows.append(
            [star, o.label, used, "yes" if o.fits else "no", duration(o.seconds), f"{o.idle:.0%}"]
        )
    return ["", *text_table(rows), ""]


if __name__ == "__main__":
    sys.exit(main(None))
