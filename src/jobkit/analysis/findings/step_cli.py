"""`python -m jobkit step-model`: a study's steps on paper, held against sizes held out."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import Exit, Parser, UsageError
from jobkit.metric.comm import read_lines

if TYPE_CHECKING:
    from jobkit.analysis.findings.step_links import Link, Links

EPILOG = """examples:
  python -m jobkit step-model strong --comm logs/comm/job-42/comm.json
  python -m jobkit step-model strong --intra 20 150 --inter 30 20

A step takes fixed + samples x time of one + what communication does not hide behind computation.
What communication takes is not fitted: it follows from the parameters and from the links. The two
smallest sizes are fitted (then three, ...), and each larger one is foretold and held against what
was measured. Three sizes are needed.
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m jobkit step-model",
        description="Model the time of a step, and foretell sizes that were measured.",
        epilog=EPILOG,
    )
    made.add_argument(
        "study", nargs="?", metavar="STUDY", help="folder or bare name (default: the newest)"
    )
    made.add_argument(
        "--comm", type=Path, metavar="FILE", help="comm.json of python -m jobkit comm"
    )
    for name, where in (("--intra", "inside a node"), ("--inter", "between nodes")):
        made.add_argument(
            name,
            nargs=2,
            type=float,
            metavar=("US", "GB_PER_S"),
            help=f"the link {where}: latency and bandwidth (instead of the file's)",
        )
    made.add_argument(
        "--algorithm",
        choices=("ring", "tree", "fastest"),
        default="ring",
        help="of the all-reduces (default: ring, as Gloo; NCCL chooses the fastest)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the models; 2 where there is none, with the reason."""
    args = parser().parse_args(argv)
    try:
        links = _links(args)
        from jobkit.analysis.collect.results import collect
        from jobkit.analysis.findings.step_model import step_lines, step_models

        found = step_models(collect(args.study, write=False), links, args.algorithm)
        if not any(one.model for one in found):
            reasons = "; ".join(f"{one.series}: {one.refused}" for one in found)
            raise UsageError(f"no step model: {reasons or 'nothing was measured'}")
        print("\n".join(step_lines(found)))
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE
    return Exit.OK


def read_links(path: Path) -> "Links":
    """The links in a comm.json; raises UsageError for a file that is none."""
    from jobkit.analysis.findings.step_links import links_of

    return links_of(read_lines(path))


def _links(args: argparse.Namespace) -> "Links":
    """The links of the file, and in their place those that were said."""
    from jobkit.analysis.findings.step_links import Links

    if not (args.comm or args.intra or args.inter):
        raise UsageError("say --comm FILE (python -m jobkit comm writes it), or --intra, --inter")
    measured = read_links(args.comm) if args.comm else Links(None, None)
    if not (args.intra or args.inter):
        return measured
    return Links(
        _link("--intra", args.intra) or measured.intra,
        _link("--inter", args.inter) or measured.inter,
    )


def _link(option: str, said: list[float] | None) -> "Link | None":
    from jobkit.analysis.findings.step_links import Link

    if said is None:
        return None
    latency_us, gb_per_s = said
    if not (0 <= latency_us < 1e9 and 0 < gb_per_s < 1e9):
        raise UsageError(f"{option} {latency_us:g} {gb_per_s:g}: microseconds, then GB/s above 0")
    return Link(latency_us * 1e-6, 1e-9 / gb_per_s)


if __name__ == "__main__":
    sys.exit(main())
