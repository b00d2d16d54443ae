"""`python -m jobkit check-edf`: finds mistakes in EDFs, without Slurm."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Parser, command
from jobkit.launch.edf.check import check
from jobkit.launch.findings import add_file_arguments, report

EXAMPLES = """examples:
  python -m jobkit check-edf edf.toml             as srun --environment=./edf.toml would see it
  python -m jobkit check-edf --no-paths edf.toml  on a laptop, for another machine

exit codes: 0 no error (warnings are no error); 2 an error in a file, or no such file"""


def parser() -> argparse.ArgumentParser:
    """The command line of check-edf."""
    made = Parser(
        prog="jobkit check-edf",
        description="Check environment definition files (EDF) of the CSCS container engine.",
        epilog=EXAMPLES,
    )
    add_file_arguments(made, "an EDF")
    made.add_argument(
        "--no-paths",
        action="store_true",
        help="the jobs run on another machine: check no path, and only warn of undefined ${VAR}",
    )
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where one is an error."""
    args = parser().parse_args(argv)
    return report(args, lambda text: check(text, Path.cwd(), os.environ, not args.no_paths))
