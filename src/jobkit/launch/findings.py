"""What a check of a user's file found, and the common end of such checks."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from jobkit.errors import Exit
from jobkit.files import MAX_TOML, read_text


@dataclass(frozen=True)
class Finding:
    """One mistake, and how to correct it."""

    severity: str  # error: it would not start, or not as meant; warning: it may be meant; note
    key: str  # such as mounts[1] or env.RANK; empty: the whole file
    message: str


@dataclass
class Findings:
    """Collects the findings on one file."""

    findings: list[Finding] = field(default_factory=list)

    def error(self, key: str, message: str) -> None:
        """Add an error."""
        self.findings.append(Finding("error", key, message))

    def warn(self, key: str, message: str) -> None:
        """Add a warning."""
        self.findings.append(Finding("warning", key, message))

    def note(self, key: str, message: str) -> None:
        """Add what is no mistake, but good to know."""
        self.findings.append(Finding("note", key, message))


def add_file_arguments(made: ArgumentParser, what: str) -> None:
    """Add the files to check, and --json."""
    made.add_argument("files", nargs="+", metavar="FILE", help=what)
    made.add_argument("--json", action="store_true", help="print the findings as JSON")


def report(args: Namespace, check: Callable[[str], list[Finding]]) -> int:
    """Check each file's text, print the findings; 2 where one is an error."""
    found = {name: _check(name, check) for name in dict.fromkeys(args.files)}
    if args.json:
        rows = [{"file": name, **asdict(f)} for name, each in found.items() for f in each]
        print(json.dumps(rows, indent=2))
    else:
        print(_as_text(found))
    failed = any(f.severity == "error" for each in found.values() for f in each)
    return Exit.USAGE if failed else Exit.OK


def _check(name: str, check: Callable[[str], list[Finding]]) -> list[Finding]:
    try:
        text = read_text(name, MAX_TOML)
    except OSError as error:
        return [Finding("error", "", f"cannot be read: {error.strerror}")]
    except ValueError:  # not UTF-8, or a NUL in the name
        return [Finding("error", "", "is no text in UTF-8")]
    return check(text)


def _as_text(found: dict[str, list[Finding]]) -> str:
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
