"""`python -m jobkit advise`: which strategy to take for a model on given GPUs, and why.

Takes the memory of each strategy from `jobkit memory`, and the time to send what it sends in a step
from the bandwidths. Ends with 4 when nothing fits, and says what would.
"""

import json
import math
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError
from jobkit.payload.memory import GIB
from jobkit.planner.choice import Option, Question, choose, command, reasons, remedies
from jobkit.planner.memory import head, row
from jobkit.planner.options import add_model_arguments, amount, base_of, positive, subject_of, whole
from jobkit.planner.traffic import Wires, duration

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
        help="network of a node, in 10^9 bytes a second each way (default 25: 200 Gbit/s)",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; 4 when nothing fits."""
    args = parser().parse_args(argv)
    try:
        if args.reserve >= 1:
            raise UsageError(f"--reserve {args.reserve:g}: must be less than 1")
        question = Question(
            base=base_of(args, args.nodes, args.nodes * args.gpus_per_node),
            subject=subject_of(args),
            usable=args.device_memory * GIB * (1 - args.reserve),
            wires=Wires(network=args.network_gb_per_s, link=args.link_gb_per_s),
        )
        options, refused = question.options()
        if not options:
            raise UsageError(next(iter(refused.values())))
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE
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
        "command": command(taken.footprint.spec, question.subject) if taken else None,
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
    lines += [f"   {label}: cannot run so: {why}" for label, why in refused.items()]
    lines += [
        "   sent: time of a ring at these bandwidths in one optimizer step; part of it hides",
        "   behind the compute. idle: part of a step in which a GPU waits for other stages.",
    ]
    if question.subject.parameters is not None:
        lines.append(
            "   not in it, as only the size is known: activations, and what full shard gathers"
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
        f"  {command(taken.footprint.spec, question.subject)}",
    ]


def _points(lines: object) -> list[str]:
    return [f"  - {line}" for line in lines]  # type: ignore[attr-defined]


def _table(options: list[Option], question: Question, taken: Option | None) -> list[str]:
    """The costs of each strategy, one line each; a star at the one to take."""
    rows = [["", "strategy", f"GiB of {question.usable / GIB:.3g}", "fits", "sent", "idle"]]
    for o in options:
        used = amount(o.footprint.total, GIB)
        star = "*" if o is taken else ""
        rows.append(
            [star, o.label, used, "yes" if o.fits else "no", duration(o.seconds), f"{o.idle:.0%}"]
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return [
        "",
        *(
            f"{r[0]:1}  {r[1]:<{widths[1]}}  "
            + "  ".join(f"{t:>{w}}" for t, w in zip(r[2:], widths[2:], strict=True))
            for r in rows
        ),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
