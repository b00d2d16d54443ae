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
from jobkit.analysis.collect.reading import Read, epoch_cells
from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import recorded_spec, result_row
from jobkit.analysis.collect.steps import Observed, step_rows
from jobkit.analysis.collect.unused import unused_lines
from jobkit.analysis.collect.windows import observed_windows
from jobkit.analysis.tables.frames import Row, cells_of
from jobkit.errors import UsageError
from jobkit.files import is_there, read_regular
from jobkit.home import cache_root
from jobkit.metric.line import Record
from jobkit.metric.pattern import Pattern, own_pattern
from jobkit.outcome.evidence import find_sign
from jobkit.outcome.logs import open_log, read_tail
from jobkit.outcome.status import BAD_ENDS, RunState
from jobkit.paths import StudyPaths, read_json, write_json
from jobkit.permissions import closed_to_others
from jobkit.spec.runspec import RunSpec

_ANYWHERE = Path("/")  # the user named the files
_HEAD = 1 << 20  # bytes of a log in which its size is looked for
# An expression whose first number is one of nodes, as nodes=(\d+) or (\d+)nodes.
_OF_NODES = re.compile(r"node[a-z_]*[^\w(]*\((?!\?)|\)-?node", re.IGNORECASE)
_SIZE = ("nodes", "ranks_per_node", "world_size")
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
        self._check_ranks(groups)
        if not self.files:
            raise UsageError("--logs: no such file")

    def _check_ranks(self, size: re.Pattern[str]) -> None:
        """Raise UsageError where the expression cannot find a number of ranks."""
        names = size.groupindex.keys()
        how = "add --gpus-per-node N, or a group (?P<ranks>...) or (?P<ranks_per_node>...)"
        if self.ranks_per_node or names & {"ranks", "ranks_per_node"}:
            return
        if "nodes" in names:
            raise UsageError(f"--size {self.size!r} finds nodes and not ranks: {how}")
        if _plain_group(size) is None:
            raise UsageError(f"--size {self.size!r} has no group for the ranks, as 'ranks=(\\d+)'")

    @property
    def doubt(self) -> str:
        """What is taken for granted of the size that the expression finds; empty for nothing."""
        size = re.compile(self.size)
        if self.ranks_per_node or size.groupindex.keys() & {"ranks", "ranks_per_node"}:
            return ""
        if not _OF_NODES.search(re.sub(r"\\[A-Za-z]", "", self.size)):  # without \d and the like
            return ""
        return (
            f"--size {self.size!r} names nodes: a node counts as one rank; with several on each "
            "add --gpus-per-node N"
        )

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


def read_logs(given: GivenLogs, study: str) -> Read:
    """What was read of the logs, in the order given."""
    pattern = given.rules()
    read, seen = Read(), Counter[tuple[object, ...]]()
    for file, run_id in zip(given.files, _names(given.files), strict=True):
        found = _found(Path(file), given, pattern)
        row = found["row"]
        place = row["series"], row.get("nodes"), row.get("ranks_per_node")
        row["repeat"] = seen[place]
        seen[place] += 1
        read.add(run_id, study, found)
    return read


def _names(files: Sequence[str]) -> list[str]:
    """A name for each file: its own, with its folder's where two are alike."""
    own = [Path(f).name for f in files]
    count = Counter(own)
    return [n if count[n] == 1 else f for n, f in zip(own, files, strict=True)]


def _found(path: Path, given: GivenLogs, pattern: Pattern | None) -> dict[str, Any]:
    """What one log holds, by the names of Read."""
    records, unreadable = RunRecords(), ""
    try:
        with open_log(path, _ANYWHERE):
            records = read_log(path)
    except OSError as error:
        unreadable = f"cannot be read: {error.strerror}"
    spec, size = recorded_spec(records), _size(path, given)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else None)
    size = size or _recorded_size(records.last("run_start"), spec, given.ranks_per_node)
    ranks = size.get("world_size")
    observed = None if unreadable else _observed(path, given, pattern, records, ranks)
    row = result_row(spec, RunState(status="ok"), records, observed=observed)
    row |= {**(size or dict.fromkeys(_SIZE)), "attempts": None, "evidence_file": path.name}
    row["series"] = str(series or (spec.strategy if spec else "log"))
    row["strategy"] = spec.strategy if spec else row["series"]
    row |= {"status": "failed", "reason": unreadable} if unreadable else {}
    row |= {} if unreadable else _judged(path, given, pattern, row, records.last("run_end"))
    return {
        "row": row,
        "epochs": epoch_cells(records),
        "steps": cells_of(step_rows(observed) if observed else []),
        "samples": cells_of([]),
        "rejected": [[r.file, r.count, r.offset, r.reason] for r in records.rejects],
        "unused": unused_lines(records, observed),
        "lost": records.lost,
        "not_taken": records.epochs_not_taken,
        "contradicted": "",
    }


def _judged(path: Path, given: GivenLogs, pattern: Pattern | None, row: Row, end: Record) -> Row:
    """How a log's run ended, and whether it can be compared. end: its record run_end, if any."""
    sign, said = find_sign(read_tail(path)), end.get("status")
    what = f"line of pattern {pattern.name}" if pattern else "[METRIC] line with a time or a rate"
    if sign and sign.status != "ok":
        return {"status": sign.status, "reason": sign.reason, "evidence": sign.text}
    if said in BAD_ENDS:
        return {"status": said, "reason": str(end.get("reason") or "its last record says so")}
    if "throughput" not in row:
        return {"status": "failed", "reason": f"no {what} in it"}
    if row["world_size"] is None:
        reason = f"no size: {given.size} finds no number of ranks in it"
        return {"status": "failed", "reason": reason}
    unknown = "read from a log: whether it ended well is not known"
    return {"status": "ok", "reason": None if said == "ok" else unknown}


def _observed(
    path: Path, given: GivenLogs, pattern: Pattern | None, records: RunRecords, ranks: int | None
) -> Observed | None:
    """What was observed of the steps: by the pattern, else of jobkit's own lines, else of others.

    A log has the windows of rank 0 alone: of several ranks they say the work only where it is
    stated.
    """
    planned = {
        "unit": given.unit,
        "work_per_step": given.work_per_step,
        "warmup_steps": given.warmup_steps,
    }
    if pattern:
        with open_log(path, _ANYWHERE) as stream:
            return observed_lines(matches(stream, pattern), pattern, ranks, planned)
    foreign = [r for r in records.records if "v" not in r]
    windows = observed_windows(records.of("window"), records.last("run_start"), planned)
    return windows or observed_metrics(foreign, ranks, planned)


def _recorded_size(start: Record, spec: RunSpec | None, per_node: int | None) -> Row:
    """The size that jobkit's own lines say; empty where there are none."""
    known = {"nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node} if spec else {}
    ranks = start.get("world_size")
    return _shape({**known, "ranks": ranks}, per_node) if type(ranks) is int and ranks > 0 else {}


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
    if (plain := _plain_group(expression)) and (found[plain] or "").isdecimal():
        numbers.setdefault("nodes" if given.ranks_per_node else "ranks", int(found[plain]))
    return {**series, **_shape(numbers, given.ranks_per_node)}


def _plain_group(expression: Any) -> int | None:
    """The first group that has no name; none where another one than series has."""
    names = expression.groupindex
    free = [n for n in range(1, expression.groups + 1) if n not in names.values()]
    return free[0] if free and not names.keys() - {"series"} else None


def _shape(numbers: Mapping[str, int], per_node: int | None) -> Row:
    """Nodes, ranks per node and ranks from those of them that are known; 1 node where none is."""
    nodes = numbers.get("nodes")
    each = numbers.get("ranks_per_node") or (per_node if nodes else None)
    ranks = numbers.get("ranks") or ((nodes or 1) * each if each else None)
    if not ranks:
        return {}
    nodes = nodes or (-(-ranks // each) if each else 1)
    return {"nodes": nodes, "ranks_per_node": each or -(-ranks // nodes), "world_size": ranks}
