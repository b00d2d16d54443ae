"""Logs that exist already: each file is a run, and no plan says what it was.

What a log cannot say is empty: its settings, its exit code.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from jobkit.analysis.collect.lines import TIMEOUT_S
from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import observed_of, of_tables, recorded_spec, result_row
from jobkit.analysis.collect.steps import IN_STEPS, Observed
from jobkit.analysis.tables.frames import Row
from jobkit.errors import UsageError
from jobkit.files import open_regular
from jobkit.metric.pattern import Pattern
from jobkit.outcome.evidence import find_sign, of_newest
from jobkit.outcome.logs import MOST_READ, read_tail
from jobkit.outcome.state import BAD_ENDS, RunState

_ANYWHERE = Path("/")  # the user named the files
_HEAD = 1 << 20  # bytes of a log in which its size is looked for
# An expression whose first number is one of nodes, as nodes=(\d+) or (\d+)nodes.
_OF_NODES = re.compile(r"node[a-z_]*[^\w(]*\((?!\?)|\)-?node", re.IGNORECASE)
_GROUPS = {"ranks", "nodes", "ranks_per_node", "series"}


@dataclass(frozen=True, kw_only=True)
class GivenLogs:
    """Which logs, and how they are read. Raises UsageError for what cannot be used."""

    files: tuple[Path, ...]
    size: str  # an expression: groups ranks, nodes, ..., or its first group is the ranks
    pattern: Pattern | None = None  # None: [METRIC] key=value lines
    ranks_per_node: int | None = None  # of a full node
    unit: str | None = None
    work_per_step: float | None = None
    warmup_steps: int = 0
    scaling: str | None = None  # strong or weak, as the user states it

    def __post_init__(self) -> None:
        try:
            size = regex.compile(self.size)
        except (regex.error, RecursionError, OverflowError) as error:
            raise UsageError(f"--size {self.size!r} does not compile: {error}") from None
        names = {*size.groupindex}
        if not size.groups:
            raise UsageError(f"--size {self.size!r} has no group, as in 'ranks=(\\d+)'")
        if unknown := names - _GROUPS:
            allowed = ", ".join(sorted(_GROUPS))
            raise UsageError(f"--size: group {min(unknown)!r} must be one of {allowed}")
        if names & {"ranks", "ranks_per_node"} or (self.ranks_per_node and "nodes" in names):
            return
        free = _free_group(size)
        if "nodes" in names or (free and _OF_NODES.search(re.sub(r"\\[A-Za-z]", "", self.size))):
            why = "finds nodes alone: name the group (?P<nodes>...) and add --gpus-per-node N, or"
            raise UsageError(f"--size {self.size!r} {why} find (?P<ranks>...) too")
        if free is None:
            raise UsageError(f"--size {self.size!r} has no group for the ranks, as 'ranks=(\\d+)'")


def read_logs(logs: GivenLogs) -> dict[str, dict[str, Any]]:
    """What was read of each log, in the order given."""
    names = Counter(path.name for path in logs.files)
    run_ids = [path.name if names[path.name] == 1 else str(path) for path in logs.files]
    runs = {k: _read(k, path, logs) for k, path in zip(run_ids, logs.files, strict=True)}
    rows = [run["row"] for run in runs.values()]
    ok = [row for row in rows if row["status"] == "ok"]
    in_steps = {row["series"] for row in ok if row.get("throughput_unit") == IN_STEPS}
    repeats = Counter[tuple[object, ...]]()
    for row in rows:
        place = row["series"], row["world_size"], row["nodes"], row["ranks_per_node"]
        row["repeat"] = repeats[place]
        repeats[place] += 1
        # The log of several ranks has rank 0's work alone, that of one rank all of it. So a series
        # in which one run has but a rate in steps has all of its rates in steps.
        if row["series"] in in_steps and row.get("step_time_s"):
            row |= {"throughput": 1 / row["step_time_s"], "throughput_unit": IN_STEPS}
            row["work_source"] = None
    return runs


def _read(run_id: str, path: Path, logs: GivenLogs) -> dict[str, Any]:
    """What one log holds."""
    records, pattern = read_log(path), logs.pattern
    spec = recorded_spec(records)
    size = size_of(path, logs)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else None)
    # Of several ranks a log has the windows of rank 0 alone.
    ranks = size.get("world_size")
    observed = observed_of(path, _ANYWHERE, records, logs, pattern, ranks, by_pattern=True)
    row = result_row(spec, RunState(status="ok"), records, observed)
    row |= size or dict.fromkeys(("nodes", "ranks_per_node", "world_size"))
    row |= {"attempts": None, "evidence_file": path.name}
    row["series"] = str(series or (spec.strategy if spec else "log"))
    row["strategy"] = spec.strategy if spec else row["series"]
    row["scaling"] = logs.scaling or row.get("scaling")
    row |= _judged(path, logs, row, records, observed)
    return of_tables(run_id, records, observed, row)


def _judged(
    path: Path, logs: GivenLogs, row: Row, records: RunRecords, observed: Observed | None
) -> Row:
    """How a log's run ended, and whether it can be compared.

    What its newest attempt recorded of its own end counts before what else the log has.
    """
    if records.unreadable:
        return {"status": "failed", "reason": records.unreadable}
    end = records.last("run_end")
    recorded = end.get("status") if end.get("attempt") == records.newest else None
    tail = of_newest(read_tail(path, within=_ANYWHERE), records.newest)
    sign = None if recorded == "ok" else find_sign(tail)
    if sign and sign.status != "ok":
        return {"status": sign.status, "reason": sign.reason, "evidence": sign.text}
    if recorded in BAD_ENDS:
        return {"status": recorded, "reason": str(end.get("reason") or "its last record says so")}
    if "throughput" not in row:
        name = f"line of pattern {logs.pattern.name}" if logs.pattern else "[METRIC] line"
        why = observed.not_taken if observed else ()
        return {"status": "failed", "reason": "; ".join(why) or f"no {name} with a time or a rate"}
    if row["world_size"] is None:
        why_not = f"no size: {logs.size} finds no number of ranks in it"
        return {"status": "failed", "reason": why_not}
    unknown = "read from a log: whether it ended well is not known"
    return {"status": "ok", "reason": None if recorded == "ok" else unknown}


def size_of(path: Path, logs: GivenLogs) -> Row:
    """The size of a run: from its log's name, its first MiB, or jobkit's lines in it; else empty.

    What the group series of the expression finds is there too. Raises UsageError where it takes too
    long.
    """
    expression, per_node = regex.compile(logs.size), logs.ranks_per_node
    try:
        with open_regular(path, MOST_READ, _ANYWHERE) as stream:
            head = stream.read(_HEAD).decode("utf-8", "replace")
        texts = [path.name, *head.splitlines()]
        match = next((m for t in texts if (m := expression.search(t, timeout=TIMEOUT_S))), None)
    except OSError:
        return {}  # the reader of records says why
    except TimeoutError:
        raise UsageError(f"--size {logs.size!r}: took longer than {TIMEOUT_S:g} s") from None
    found = {k: v for k, v in match.groupdict().items() if v} if match else {}
    if match and (free := _free_group(expression)):
        found.setdefault("ranks", match[free] or "")
    series = {"series": found.pop("series")} if "series" in found else {}
    if shape := _shape({k: int(v) for k, v in found.items() if v.isdecimal()}, per_node):
        return series | shape
    start = read_log(path).last("run_start")
    numbers = {"ranks": start.get("world_size"), "nodes": start.get("nodes")}
    known = {k: v for k, v in numbers.items() if type(v) is int and v > 0}
    return series | _shape(known, per_node)


def _free_group(size: Any) -> int | None:
    """The first group without a name, which is the ranks; None where a named one is the size."""
    names = size.groupindex
    free = [n for n in range(1, size.groups + 1) if n not in names.values()]
    return free[0] if free and not names.keys() - {"series"} else None


def _shape(numbers: Mapping[str, int], per_node: int | None) -> Row:
    """Nodes, ranks per node and ranks from those of them that are known."""
    nodes, ranks = numbers.get("nodes"), numbers.get("ranks")
    on_node = numbers.get("ranks_per_node")
    if not on_node and per_node and bool(nodes) != bool(ranks):
        on_node = min(per_node, ranks or per_node)
    ranks = ranks or ((nodes or 1) * on_node if on_node else None)
    if not ranks or ranks >= 1 << 31:
        return {}
    nodes = nodes or (1 if ranks == 1 else -(-ranks // on_node) if on_node else None)
    on_node = on_node or (-(-ranks // nodes) if nodes else None)
    return {"nodes": nodes, "ranks_per_node": on_node, "world_size": ranks}
