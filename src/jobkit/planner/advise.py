"""Recommend a strategy for a model on given GPUs, with reasons.

One GPU: single. Several: of the strategies that split the batch and fit in memory, the one that
communicates least at these bandwidths; where none fits, one that splits the model. Ends with 4 when
nothing fits.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jobkit.errors import Exit, Parser, UsageError, at_least, command, positive, whole
from jobkit.planner.memory import add_model_arguments, amount, base_of, head, text_table
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Link, Links, seconds
from jobkit.units import GIB, say_seconds

if TYPE_CHECKING:
    from jobkit.planner.footprint import Footprint

EPILOG = """examples:
  python -m jobkit advise --model resnet18 --device-memory 80 --gpus-per-node 4
  python -m jobkit advise --model cnn --width 32 --optimizer adamw --device-memory 16 \\
      --nodes 4 --gpus-per-node 4 --network-gb-per-s 12.5 --link-gb-per-s 200
"""


class Option(NamedTuple):
    """A strategy, and what it costs."""

    footprint: "Footprint"
    fits: bool
    seconds: float  # of communication in a step, at least; NaN: not known
    waits: str  # for other ranks in a step, at most; -: not known
    idle: float  # share of a step

    @property
    def duration(self) -> str:
        return "-" if math.isnan(self.seconds) else say_seconds(self.seconds)

    @property
    def splits_model(self) -> bool:
        """Whether it splits the model over the ranks; the others split the batch."""
        return FACTS[self.footprint.spec.strategy].splits_model


def links_of(network: float, link: float) -> Links:
    """A node's network and the link of a GPU to the others of its node, in 10^9 bytes/s.

    Latency is left out, and how much is overlapped with the compute is not known.
    """
    return Links(intra=Link(0.0, 1e-9 / link), inter=Link(0.0, 1e-9 / min(network, link)))


def choose(options: Sequence[Option]) -> Option | None:
    """The one to take: of those that split the batch and fit, the one that sends least.

    Ranks that split the batch do all work at once, so those come first. Of equals it is the first,
    as the table of strategies has the simpler ones before.
    """
    fitting = [option for option in options if option.fits]
    if first := [option for option in fitting if not option.splits_model]:
        return min(first, key=lambda option: float(f"{option.seconds:.9g}"))
    return min(fitting, key=lambda option: option.idle, default=None)


def reason(taken: Option) -> str:
    if taken.footprint.label == "single":
        return "one GPU: it fits, and there is no communication"
    if taken.splits_model:
        return f"no strategy that splits the batch fits; each GPU is idle for {taken.idle:.0%}"
    if math.isnan(taken.seconds):
        return "how much it communicates is not known"
    return f"of those that fit it communicates least: {taken.duration} per step"


_NOTES = """   communication: of one optimizer step at these bandwidths, as rings; some is hidden by
   computation. waits: how often a GPU waits for others in a step, at most. idle: part of a step
   that a GPU waits for other stages."""


def parser() -> Parser:
    parser = Parser(
        prog="jobkit advise",
        usage="%(prog)s --device-memory GIB [options]",
        description=__doc__.splitlines()[0],
        epilog=EPILOG,
    )
    reserve = "memory left for CUDA and NCCL, less than 1 (default 0.1)"
    rows: tuple[tuple[str, Any, Any, str, str], ...] = (
        ("device-memory", positive, None, "GIB", "memory of one GPU, in GiB"),
        ("nodes", whole(1, 10**5), 1, "N", "number of nodes (default 1)"),
        ("gpus-per-node", whole(1, 1024), 1, "N", "(default 1)"),
        ("network-gb-per-s", positive, 25.0, "X", "network of a node (default 25: 200 Gbit/s)"),
        ("link-gb-per-s", positive, 25.0, "X", "a GPU to its node's (default 25: PCIe 4.0 x16)"),
        ("reserve", at_least(float, 0, 0.99), 0.1, "SHARE", reserve),
    )
    for name, kind, default, metavar, text in rows:
        more = {"type": kind, "default": default, "required": default is None}
        parser.add_argument(f"--{name}", metavar=metavar, help=text, **more)
    # All modes are in the table, so that what makes one is not to be set.
    plain = RunSpec().to_dict()
    modes = (mode for facts in FACTS.values() for mode in facts.modes(plain).values())
    add_model_arguments(parser, skip=("strategy", *(name for mode in modes for name in mode)))
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; 4 when nothing fits."""
    args = parser().parse_args(argv)
    # After the arguments: torch takes seconds to import, and --help needs none of it.
    from jobkit.planner.footprint import Subject, footprints, idle_share, step_messages

    base = base_of(args, args.nodes, args.nodes * args.gpus_per_node)
    subject = Subject(classes=args.classes, images=args.images)
    usable = args.device_memory * GIB * (1 - args.reserve)
    links = links_of(args.network_gb_per_s, args.link_gb_per_s)
    # Those that use all of these GPUs.
    alone = base.world_size == 1
    names = [n for n, f in FACTS.items() if f.one_rank == alone and not f.whole_node]
    possible, refused = footprints(base, subject, names)
    if not possible:
        raise UsageError(next(iter(refused.values())))
    options = []
    for each in possible:
        costs, idle = (math.nan, "-"), idle_share(each.spec)
        if (messages := step_messages(each, subject)) is not None:
            waits = sum(m.count for m in messages if m.scope.ranks > 1)  # none is overlapped
            costs = (seconds(messages, links), str(waits))
        options.append(Option(each, each.total <= usable, *costs, idle))
    taken = choose(options)
    gib = f"GiB of {usable / GIB:.3g}"
    rows = [["", "strategy", gib, "fits", "communication", "waits", "idle"]]
    for o in options:
        texts = ["yes" if o.fits else "no", o.duration, o.waits, f"{o.idle:.0%}"]
        rows.append(["*" * (o is taken), o.footprint.label, amount(o.footprint.total, GIB), *texts])
    lines = [head(base, args.classes), "", *text_table(rows), ""]
    lines += [f"   {label}: not applicable: {why}" for label, why in refused.items()]
    lines += [_NOTES, ""]
    if taken is None:
        least = min(options, key=lambda option: option.footprint.total)
        lines.append(
            f"nothing fits into {usable / GIB:.3g} GiB. The smallest is {least.footprint.label} "
            f"with {least.footprint.total / GIB:.3g} GiB: ask again with more GPUs, a smaller "
            "batch (--batch-size-per-rank), --accumulate or --activation-checkpointing"
        )
    else:
        lines += [f"recommended: {taken.footprint.label}", f"  - {reason(taken)}"]
        used = f"{taken.footprint.total / usable:.0%} of the memory that may be used"
        lines.append(f"  - it takes {used} on each GPU")
        spec = taken.footprint.spec
        start = f"sbatch --nodes={spec.nodes} --ntasks-per-node={spec.ranks_per_node}"
        start += f" --gpus-per-node={spec.ranks_per_node} run.sh"
        lines += ["run:", f"  {start} {shlex.join(spec.arguments())}"]
    print("\n".join(lines))
    return Exit.OK if taken else Exit.THRESHOLD


if __name__ == "__main__":
    sys.exit(main(None))
