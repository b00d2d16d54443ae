"""`python -m jobkit check-edf`: find what is wrong in a container's EDF, without Slurm."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit
from jobkit.files import read_regular
from jobkit.launch.edf.check import check
from jobkit.launch.edf.text import Finding

EXAMPLES = """examples:
  python -m jobkit check-edf edf.toml             as srun --environment=./edf.toml would see it
  python -m jobkit check-edf --no-paths edf.toml  on a laptop, for another machine

exit codes: 0 no error (warnings are no error); 2 an error in a file, or no such file"""


def parser() -> argparse.ArgumentParser:
    """The command line of check-edf."""
    made = argparse.ArgumentParser(
        prog="jobkit check-edf",
        description="Check environment definition files (EDF) of the CSCS container engine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="an EDF")
    made.add_argument(
        "--no-paths",
        action="store_true",
        help="this is not the machine of the jobs: look for no path, and only warn of ${VAR} that "
        "is not set",
    )
    made.add_argument("--json", action="store_true", help="the findings for a program to read")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print what was found; 2 where there was an error."""
    args = parser().parse_args(argv)
    found = {name: _check(name, here=not args.no_paths) for name in dict.fromkeys(args.files)}
    print(_as_json(found) if args.json else _as_text(found))
    failed = any(f.severity == "error" for findings in found.values() for f in findings)
    return Exit.USAGE if failed else Exit.OK


def _check(name: str, here: bool) -> list[Finding]:
    """The findings on one file, of which one may be that it cannot be read."""
    try:
        data = read_regular(name)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return [Finding(line=0, severity="error", message=f"cannot be read: {why}")]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return [Finding(line=line, severity="error", message="no text in UTF-8: save it as such")]
    return check(text, Path.cwd(), os.environ, here)


def _as_json(found: dict[str, list[Finding]]) -> str:
    rows = [
        {"file": name, "line": f.line, "severity": f.severity, "message": f.message}
        for name, findings in found.items()
        for f in findings
    ]
    return json.dumps(rows, indent=2)


def _as_text(found: dict[str, list[Finding]]) -> str:
    """A line for each finding, as compilers write them, and the sum."""
    lines = []
    for name, findings in found.items():
        for f in findings:
            place = f"{name}:{f.line}" if f.line else name
            lines.append(f"{place}: {f.severity}: {_one_line(f.message)}")
    every = [f.severity for findings in found.values() for f in findings]
    counts = [_count(every.count(kind), kind) for kind in ("error", "warning")]
    return "\n".join([*lines, f"{_count(len(found), 'file')} checked: {', '.join(counts)}"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    """What a terminal can show: a value of the file may hold line ends and control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
