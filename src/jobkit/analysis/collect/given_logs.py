"""A study of logs that exist already: each file is a run, and no plan says what it was.

The folder of such a study has logs.json: the files, the pattern that reads them, and the expression
that finds the size of each. What a log cannot say is empty: its settings, its exit code.
"""

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import regex

from jobkit.analysis.collect.lines import TIMEOUT_S, matches, observed_lines, observed_metrics
from jobkit.analysis.collect.steps import Observed, rate_row, step_rows
from jobkit.analysis.tables.frames import Row
from jobkit.errors import UsageError
from jobkit.files import is_there, read_regular
from jobkit.home import cache_root
from jobkit.metric.pattern import Pattern, own_pattern
from jobkit.metric.reader import scan
from jobkit.outcome.evidence import find_sign
from jobkit.outcome.logs import open_log, read_tail
from jobkit.paths import StudyPaths, read_json, write_json
from jobkit.permissions import closed_to_others

_ANYWHERE = Path("/")  # the user named the files
_HEAD = 1 << 20  # bytes of a log in which its size is looked for
_NAMED = ("ranks", "nodes", "ranks_per_node", "series")


@dataclass(frozen=True, kw_only=True)
class GivenLogs:
    """Which logs, and how they are read. Raises UsageError for what cannot be used."""

    files: tuple[str, ...]
    size: str  # an expression: its first group is the ranks, or groups ranks, nodes, ...
    pattern: Mapping[str, Any] | None = None  # None: [METRIC] key=value lines
    pattern_name: str = ""
    ranks_per_node: int | None = None
    unit: str | None = None
    work_per_step: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.size)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"--size {self.size!r} does not compile: {error}") from None
        if not groups.groups:
            raise UsageError(f"--size {self.size!r} has no group, as in 'ranks=(\\d+)'")
        for name in groups.groupindex:
            if name not in _NAMED:
                raise UsageError(f"--size: group {name!r} must be one of {', '.join(_NAMED)}")
        if not self.files:
            raise UsageError("--logs: no such file")

    def rules(self) -> Pattern | None:
        """The pattern. Raises UsageError where it is none."""
        return own_pattern(self.pattern, self.pattern_name) if self.pattern else None

    @closed_to_others()
    def save(self, paths: StudyPaths) -> None:
        """Write logs.json into the study's folder. Raises UsageError where it has a plan."""
        if paths.plan.exists():
            raise UsageError(f"{paths.folder} is a study with a plan: give another --name")
        paths.folder.mkdir(parents=True, exist_ok=True)
        write_json(paths.given_logs, {"v": 1, **asdict(self)})
        with contextlib.suppress(OSError):  # without it, collect --logs has to be called again
            mark = _mark(paths.given_logs)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    @classmethod
    def read(cls, path: Path) -> "GivenLogs":
        """Read logs.json. Raises UsageError where it is none, or names files elsewhere unasked."""
        values = read_json(path) or {}
        values.pop("v", None)
        try:
            files = tuple(str(f) for f in values.pop("files"))
            made = cls(files=files, **values)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is no list of logs: {error}") from None
        inside = path.parent.resolve()
        if not all(Path(f).resolve().is_relative_to(inside) for f in files) and not is_there(
            _mark(path)
        ):
            raise UsageError(
                f"{path} names files outside of the study and was not written by you here: "
                "call collect with --logs"
            )
        return made


def _mark(path: Path) -> Path:
    """What shows that this user wrote a list of logs here: it may name any of their files."""
    return cache_root() / "given-logs" / hashlib.sha256(read_regular(path)).hexdigest()


def log_rows(given: GivenLogs, study: str) -> tuple[list[Row], list[list[Row]]]:
    """The rows of results.csv, and those of steps.csv of each; the logs in the order given."""
    pattern = given.rules()
    rows, steps, seen = [], [], Counter[tuple[object, ...]]()
    names = _names(given.files)
    for file, run_id in zip(given.files, names, strict=True):
        row, observed = _row(Path(file), given, pattern)
        place = row["series"], row.get("nodes"), row.get("ranks_per_node")
        row |= {"run_id": run_id, "study": study, "repeat": seen[place]}
        seen[place] += 1
        rows.append(row)
        steps.append(step_rows(observed) if observed else [])
    return rows, steps


def _names(files: Sequence[str]) -> list[str]:
    """A name for each file: its own, with its folder's where two are alike."""
    own = [Path(f).name for f in files]
    count = Counter(own)
    return [n if count[n] == 1 else f for n, f in zip(own, files, strict=True)]


def _row(path: Path, given: GivenLogs, pattern: Pattern | None) -> tuple[Row, Observed | None]:
    """The columns that one log fills, and what was observed of its steps."""
    size = _size(path, given)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else "log")
    row: Row = {**size, "series": str(series), "strategy": str(series)}
    row["evidence_file"] = path.name
    try:
        observed = _observed(path, given, pattern, row.get("world_size"))
    except OSError as error:
        return row | {"status": "failed", "reason": f"cannot be read: {error.strerror}"}, None
    sign = find_sign(read_tail(path))
    what = f"line of pattern {pattern.name}" if pattern else "[METRIC] line with a time or a rate"
    if sign and sign.status != "ok":
        row |= {"status": sign.status, "reason": sign.reason, "evidence": sign.text}
    elif observed is None:
        row |= {"status": "failed", "reason": f"no {what} in it"}
    elif "world_size" not in row:
        row |= {"status": "failed", "reason": f"no size: nothing in it matches {given.size}"}
    else:
        row["status"] = "ok"
        row["reason"] = "read from a log: whether it ended well is not known"
    return row | (rate_row(observed) if observed else {}), observed


def _observed(
    path: Path, given: GivenLogs, pattern: Pattern | None, ranks: int | None
) -> Observed | None:
    planned = {
        "unit": given.unit,
        "work_per_step": given.work_per_step,
        "warmup_steps": given.warmup_steps,
    }
    with open_log(path, _ANYWHERE) as stream:
        if pattern:
            return observed_lines(matches(stream, pattern), pattern, ranks, planned)
        records = [r for r in scan(stream) if isinstance(r, dict)]
        return observed_metrics(records, ranks, planned)


def _size(path: Path, given: GivenLogs) -> Row:
    """The size of a run: from the name of its log, else from its first MiB; empty if in neither."""
    expression = regex.compile(given.size)
    try:
        with open_log(path, _ANYWHERE) as stream:
            head = stream.read(_HEAD).decode("utf-8", "replace")
        texts = [path.name, *head.splitlines()]
        found = next((m for t in texts if (m := expression.search(t, timeout=TIMEOUT_S))), None)
    except OSError:
        return {}
    except TimeoutError:
        raise UsageError(f"--size {given.size!r}: took longer than {TIMEOUT_S:g} s") from None
    if found is None:
        return {}
    named = {k: v for k, v in found.groupdict().items() if v}
    series = {"series": named.pop("series")} if "series" in named else {}
    numbers = {k: int(v) for k, v in named.items() if v.isdecimal()}
    if not named and (found[1] or "").isdecimal():
        numbers = {"nodes" if given.ranks_per_node else "ranks": int(found[1])}
    return {**series, **_shape(numbers, given.ranks_per_node)}


def _shape(numbers: Mapping[str, int], per_node: int | None) -> Row:
    """Nodes, ranks per node and ranks from those of them that are known; 1 node where none is."""
    nodes = numbers.get("nodes")
    each = numbers.get("ranks_per_node") or (per_node if nodes else None)
    ranks = numbers.get("ranks") or ((nodes or 1) * each if each else None)
    if not ranks:
        return {}
    nodes = nodes or (-(-ranks // each) if each else 1)
    return {"nodes": nodes, "ranks_per_node": each or -(-ranks // nodes), "world_size": ranks}
