"""`python -m jobkit check-edf`: finds mistakes in EDFs, without Slurm."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jobkit.errors import Exit, Parser, command
from jobkit.files import MOST_TOML, read_text
from jobkit.launch.edf.check import check
from jobkit.launch.edf.report import EdfFinding

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
    made.add_argument("files", nargs="+", metavar="FILE", help="an EDF")
    made.add_argument(
        "--no-paths",
        action="store_true",
        help="the jobs run on another machine: check no path, and only warn of undefined ${VAR}",
    )
    made.add_argument("--json", action="store_true", help="print the findings as JSON")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where one is an error."""
    args = parser().parse_args(argv)
    found = {name: _check(name, here=not args.no_paths) for name in dict.fromkeys(args.files)}
    if args.json:
        rows = [{"file": name, **asdict(f)} for name, each in found.items() for f in each]
        print(json.dumps(rows, indent=2))
    else:
        print(_as_text(found))
    failed = any(f.severity == "error" for each in found.values() for f in each)
    return Exit.USAGE if failed else Exit.OK


def _check(name: str, here: bool) -> list[EdfFinding]:
    try:
        text = read_text(name, MOST_TOML)
    except OSError as error:
        return [EdfFinding("error", "", f"cannot be read: {error.strerror}")]
    except ValueError:  # not UTF-8, or a NUL in the name
        return [EdfFinding("error", "", "is no text in UTF-8")]
    return check(text, Path.cwd(), os.environ, here)


def _as_text(found: dict[str, list[EdfFinding]]) -> str:
    """One line per finding, and the totals."""
    lines = []
    for name, findings in found.items():
        for f in findings:
            parts = [name, f.severity, *([f.key] if f.key else []), f.message]
            lines.append(_printable(": ".join(parts)))
    severities = [f.severity for findings in found.values() for f in findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    return "\n".join([*lines, f"files: {len(found)}, errors: {errors}, warnings: {warnings}"])


def _printable(text: str) -> str:
    """The text with its control characters escaped: values of the file may hold them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
