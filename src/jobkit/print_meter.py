"""`python -m jobkit meter`: the meter as one file, for an image without jobkit."""

from collections.abc import Sequence

from jobkit.errors import Parser
from jobkit.program import single


def main(argv: Sequence[str] | None = None) -> int:
    """Print the file."""
    parser = Parser(
        prog="jobkit meter",
        description="Print the meter as one file (standard library, Python 3.10), for an image.",
        epilog="example: python -m jobkit meter > meter.py",
    )
    parser.parse_args(argv)
    print(single.source(), end="")
    return 0
