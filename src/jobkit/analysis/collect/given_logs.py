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

from jobkit.analysis.collect.lines import matches, observed_lines, observed_metrics
from jobkit.analysis.collect.log_size import plain_group, recorded_size, size_of
from jobkit.analysis.collect.reading import Read, epoch_rows
from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import recorded_spec, result_row
from jobkit.analysis.collect.steps import IN_STEPS, Observed, step_rows
from jobkit.analysis.collect.unused import unused_lines
from jobkit.analysis.collect.windows import observed_windows
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import series_labels
from jobkit.errors import UsageError
from jobkit.files import is_there, read_regular
from jobkit.metric.pattern import Pattern, own_pattern
from jobkit.outcome.evidence import find_sign, of_newest
from jobkit.outcome.logs import open_log, read_tail
from jobkit.outcome.state import BAD_ENDS, RunState
from jobkit.paths import StudyPaths, cache_root, read_json, write_json
from jobkit.permissions import closed_to_others

_ANYWHERE = Path("/")  # the user named the files
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
        if plain_group(size) is None:
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
    found = {
        run_id: _found(Path(file), given, pattern)
        for file, run_id in zip(given.files, _names(given.files), strict=True)
    }
    labels = series_labels({k: one["unnamed"] for k, one in found.items() if one["unnamed"]})
    for run_id, one in found.items():
        row = one["row"]
        row["series"] = labels.get(run_id, row["series"])
        place = row["series"], row.get("nodes"), row.get("ranks_per_node")
        row["repeat"] = seen[place]
        seen[place] += 1
        read.add(run_id, study, one)
    _in_one_unit(read.rows)
    return read


def _in_one_unit(rows: Sequence[Row]) -> None:
    """Give a series' rates in steps where a log of it has none but that.

    The log of several ranks has rank 0's work alone, that of one rank all of it.
    """
    ok = [row for row in rows if row["status"] == "ok"]
    in_steps = {row["series"] for row in ok if row.get("throughput_unit") == IN_STEPS}
    for row in rows:
        if row["series"] in in_steps and row.get("step_time_s"):
            row |= {"throughput": 1 / row["step_time_s"], "throughput_unit": IN_STEPS}
            row["work_source"] = None


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
    spec = recorded_spec(records)
    size = size_of(path, given.size, given.ranks_per_node)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else None)
    unnamed = None if series else spec
    size = size or recorded_size(records.last("run_start"), spec, given.ranks_per_node)
    ranks = size.get("world_size")
    observed = None if unreadable else _observed(path, given, pattern, records, ranks)
    row = result_row(spec, RunState(status="ok"), records, observed=observed)
    row |= {**(size or dict.fromkeys(_SIZE)), "attempts": None, "evidence_file": path.name}
    row["series"] = str(series or (spec.strategy if spec else "log"))
    row["strategy"] = spec.strategy if spec else row["series"]
    row |= {"status": "failed", "reason": unreadable} if unreadable else {}
    row |= {} if unreadable else _judged(path, given, pattern, row, records)
    return {
        "row": row,
        "unnamed": unnamed,  # the settings of a run that only they name
        "epochs": epoch_rows(records),
        "steps": step_rows(observed) if observed else [],
        "samples": [],
        "rejected": list(records.rejects),
        "unused": unused_lines(records, observed),
        "lost": records.lost,
        "not_taken": records.epochs_not_taken,
        "contradicted": "",
    }


def _judged(
    path: Path, given: GivenLogs, pattern: Pattern | None, row: Row, records: RunRecords
) -> Row:
    """How a log's run ended, and whether it can be compared.

    What its newest attempt recorded of its own end counts before what else the log has.
    """
    end = records.last("run_end")
    newest = max((r["attempt"] for r in records.records if "v" in r), default=None)
    said = end.get("status") if end.get("attempt") == newest else None
    tail = of_newest(read_tail(path, within=_ANYWHERE), newest)
    sign = None if said == "ok" else find_sign(tail)
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
    windows = observed_windows(records.of("window"), records.last("run_start"), planned, ranks)
    return windows or observed_metrics(foreign, ranks, planned)
