"""Where things stand in an EDF, what its ${VAR} mean, and what was found wrong with it."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import nearest

Key = tuple[str | int, ...]  # ("annotations", "com", "hooks", ...), ("mounts", 0)

LONGEST_STATEMENT = 200  # lines; what follows a longer one is not located any more

# $$ | ${NAME} | ${NAME:-default} | a $ that starts none of them
_DOLLAR = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*)?)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, and the way to put it right."""

    line: int  # counts from 1
    severity: str  # "error": the job would not start, or not as meant; "warning": look at it
    message: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine and the moment at which srun reads the EDF."""

    folder: Path  # where srun is called: relative paths start there, wherever the EDF lies
    environ: Mapping[str, str]
    here: bool = True  # False: another machine, so that neither paths nor variables can be checked

    def missing(self, path: str) -> bool:
        """Whether a path is known not to exist."""
        return self.here and not self._is(Path.exists, path)

    def is_folder(self, path: str) -> bool:
        """Whether a path is known to be a folder."""
        return self.here and self._is(Path.is_dir, path)

    def is_file(self, path: str | Path) -> bool:
        """Whether there is such a file, wherever this is."""
        return self._is(Path.is_file, path)

    def _is(self, question: Callable[[Path], bool], path: str | Path) -> bool:
        try:
            return question(self.folder / path)
        except (OSError, ValueError):  # a name too long, a folder that may not be read
            return False


@dataclass(kw_only=True)
class Report:
    """The findings on one file."""

    lines: dict[Key, int]
    findings: list[Finding] = field(default_factory=list)

    def error(self, key: Key, message: str) -> None:
        """Note that the file cannot be used as it is."""
        self.add("error", key, message)

    def warn(self, key: Key, message: str) -> None:
        """Note what may be meant, and may not."""
        self.add("warning", key, message)

    def add(self, severity: str, key: Key, message: str) -> None:
        """Note a finding on the line of a key, or of what holds it."""
        while key and key not in self.lines:
            key = key[:-1]
        line = self.lines.get(key, 1)
        self.findings.append(Finding(line=line, severity=severity, message=message))


def key_lines(text: str) -> dict[Key, int]:
    """The line of each key, and of each item of an array, of a text that is valid TOML.

    tomllib keeps no lines. But it says where a statement ends: there, what was gathered since the
    last one becomes valid by itself.
    """
    found: dict[Key, int] = {}
    table: Key = ()
    chunk: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not chunk and line.strip()[:1] in ("", "#"):
            continue
        chunk.append(line)
        start = number - len(chunk) + 1
        whole = _parsed("\n".join(chunk))
        part = _parsed("\n".join([*chunk, "]"])) if whole is None else whole  # an array so far
        header = whole is not None and chunk[0].lstrip().startswith("[")
        keys = [key if header else table + key for key in _keys(part or {})]
        for key in keys:
            found.setdefault(key, number if isinstance(key[-1], int) else start)
        if header:
            table = max(keys, key=len)
        if whole is not None:
            chunk = []
        elif len(chunk) > LONGEST_STATEMENT:
            break
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _keys(value: Any) -> Iterator[Key]:
    """The path of everything in a parsed value, from the outside to the inside."""
    pairs: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for name, inner in pairs:
        yield (name,)
        for key in _keys(inner):
            yield (name, *key)


def expand(value: str, key: Key, host: Host, report: Report) -> str | None:
    """Put in the host's variables; None where that is not possible, which the report then says."""
    known = True

    def swap(match: re.Match[str]) -> str:
        nonlocal known
        name, default, bare = match.groups()
        if match[0] == "$$":
            return "$"
        if name is None:
            known = False
            report.error(key, _not_expanded(bare))
            return ""
        if default is not None:
            return host.environ.get(name) or default
        if name not in host.environ:
            known = False
            report.add(*_undefined(name, key, host))
            return ""
        return host.environ[name]

    text = _DOLLAR.sub(swap, value)
    return text if known else None


def _not_expanded(bare: str | None) -> str:
    if bare:
        return f"${bare} is not expanded: braces are required, write ${{{bare}}}"
    return "a '$' that starts no variable: write ${VAR} or ${VAR:-default}, or $$ for a dollar sign"


def _undefined(name: str, key: Key, host: Host) -> tuple[str, Key, str]:
    """The severity, place and text for a variable that is not set."""
    if name.startswith("SLURM_"):
        return "warning", key, f"${{{name}}} is set only within a job: srun must be called in one"
    hint = nearest(name, host.environ)
    fix = f"export it, or write ${{{name}:-}} where it may be undefined"
    return ("error" if host.here else "warning"), key, f"${{{name}}} is not set: {fix}{hint}"
