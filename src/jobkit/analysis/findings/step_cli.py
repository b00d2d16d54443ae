"""`python -m jobkit step-model`: a step-time model, validated on held-out sizes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.metric.comm import read_lines

if TYPE_CHECKING:
    from jobkit.spec.traffic import Links

EPILOG = """examples:
  python -m jobkit step-model strong --comm logs/comm/job-42/comm.json
  python -m jobkit step-model strong --comm logs/comm/*/comm.json   # links measured at each size

A step takes fixed + samples x time per sample + exposed communication. What communication takes is
not fitted: it follows from the parameters and from the measured links. The two smallest sizes are
fitted (then three, ...), and each larger one is predicted and compared with its measurement. Three
sizes are needed.
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="jobkit step-model",
        description="Model the time of a step, and validate it on held-out sizes.",
        epilog=EPILOG,
    )
    made.add_argument(
        "study", nargs="?", metavar="STUDY", help="folder or bare name (default: the newest)"
    )
    made.add_argument(
        *("--comm",),
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="comm.json of python -m jobkit comm: the measured links, of one size or of several",
    )
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the models; 2 where there is none, with the reason."""
    args = parser().parse_args(argv)
    links = read_links(args.comm)
    from jobkit.analysis.collect.results import Results
    from jobkit.analysis.findings.step_model import step_lines, step_models

    found = step_models(Results.load(args.study), links)
    if not any(one.model for one in found):
        reasons = "; ".join(f"{one.series}: {one.refused}" for one in found)
        raise UsageError(f"no step model: {reasons or 'nothing was measured'}")
    print("\n".join(step_lines(found)))
    return Exit.OK


def read_links(paths: Sequence[Path]) -> "Links":
    """The links in one comm.json or several; raises UsageError for a file that is none."""
    from jobkit.analysis.findings.step_links import links_of

    return links_of([line for path in paths for line in read_lines(path)])


if __name__ == "__main__":
    sys.exit(main(None))
