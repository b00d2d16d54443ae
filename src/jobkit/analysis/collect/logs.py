"""Logs that exist already: each file is a run, and no plan says what it was.

What a log cannot say is empty: its settings, its exit code.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from jobkit.analysis.collect.lines import TIMEOUT_S, matches, observed_lines, observed_metrics
from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import recorded_spec, result_row
from jobkit.analysis.collect.steps import IN_STEPS, Observed, observed_windows
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import series_labels
from jobkit.errors import UsageError
from jobkit.metric.pattern import Pattern
from jobkit.outcome.evidence import find_sign, of_newest
from jobkit.outcome.logs import open_log, read_tail
from jobkit.outcome.state import BAD_ENDS, RunState

_ANYWHERE = Path("/")  # the user named the files
_HEAD = 1 << 20  # bytes of a log in which its size is looked for
# An expression whose first number is one of nodes, as nodes=(\d+) or (\d+)nodes.
_OF_NODES = re.compile(r"node[a-z_]*[^\w(]*\((?!\?)|\)-?node", re.IGNORECASE)
_GROUPS = ("ranks", "nodes", "ranks_per_node", "series")


@dataclass(frozen=True, kw_only=True)
class GivenLogs:
    """Which logs, and how they are read. Raises UsageError for what cannot be used."""

    files: tuple[Path, ...]
    size: str  # an expression: its first group is the ranks, or groups ranks, nodes, ...
    pattern: Pattern | None = None  # None: [METRIC] key=value lines
    ranks_per_node: int | None = None  # of a full node
    unit: str | None = None
    work_per_step: float | None = None
    warmup_steps: int = 0
    scaling: str | None = None  # strong or weak, as the user states it

    def __post_init__(self) -> None:
        try:
            size = re.compile(self.size)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"--size {self.size!r} does not compile: {error}") from None
        if not size.groups:
            raise UsageError(f"--size {self.size!r} has no group, as in 'ranks=(\\d+)'")
        names = size.groupindex.keys()
        for name in names - {*_GROUPS}:
            raise UsageError(f"--size: group {name!r} must be one of {', '.join(_GROUPS)}")
        if names & {"ranks", "ranks_per_node"} or (self.ranks_per_node and "nodes" in names):
            return
        text = re.sub(r"\\[A-Za-z]", "", self.size)  # without \d
        if "nodes" in names or (_plain_group(size) and _OF_NODES.search(text)):
            raise UsageError(
                f"--size {self.size!r} finds nodes and not ranks: name the group (?P<nodes>...) "
                "and add --gpus-per-node N, or find (?P<ranks>...) too"
            )
        if _plain_group(size) is None:
            raise UsageError(f"--size {self.size!r} has no group for the ranks, as 'ranks=(\\d+)'")


def read_logs(logs: GivenLogs) -> dict[str, dict[str, Any]]:
    """What was read of each log, in the order given."""
    names = [path.name for path in logs.files]
    run_ids = [n if names.count(n) == 1 else str(f) for n, f in zip(names, logs.files, strict=True)]
    runs = {k: _read(path, logs) for k, path in zip(run_ids, logs.files, strict=True)}
    labels = series_labels({k: run["unnamed"] for k, run in runs.items() if run["unnamed"]})
    repeats = Counter[tuple[object, ...]]()
    for run_id, run in runs.items():
        row = run["row"]
        row["series"] = labels.get(run_id, row["series"])
        place = row["series"], row.get("nodes"), row.get("ranks_per_node")
        row["repeat"] = repeats[place]
        repeats[place] += 1
    _in_one_unit([run["row"] for run in runs.values()])
    return runs


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


def _read(path: Path, logs: GivenLogs) -> dict[str, Any]:
    """What one log holds."""
    records, unreadable, pattern = RunRecords(), "", logs.pattern
    try:
        with open_log(path, _ANYWHERE):
            records = read_log(path)
    except OSError as error:
        unreadable = f"cannot be read: {error.strerror}"
    spec = recorded_spec(records)
    size = size_of(path, logs.size, logs.ranks_per_node)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else None)
    ranks = records.last("run_start").get("world_size")
    if not size and type(ranks) is int and ranks > 0:  # as jobkit's own lines say it
        known = {"nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node} if spec else {}
        size = _shape({**known, "ranks": ranks}, logs.ranks_per_node)
    observed = None if unreadable else _observed(path, logs, records, size.get("world_size"))
    row = result_row(spec, RunState(status="ok"), records, observed=observed)
    row |= size or dict.fromkeys(("nodes", "ranks_per_node", "world_size"))
    row |= {"attempts": None, "evidence_file": path.name}
    row["series"] = str(series or (spec.strategy if spec else "log"))
    row["strategy"] = spec.strategy if spec else row["series"]
    row["scaling"] = logs.scaling or row.get("scaling")
    if unreadable:
        row |= {"status": "failed", "reason": unreadable}
    else:
        row |= _judged(path, logs, row, records, observed)
    return {
        "records": records,
        "observed": observed,
        "row": row,
        "unnamed": None if series else spec,  # the settings of a run that only they name
    }


def _judged(
    path: Path, logs: GivenLogs, row: Row, records: RunRecords, observed: Observed | None
) -> Row:
    """How a log's run ended, and whether it can be compared.

    What its newest attempt recorded of its own end counts before what else the log has.
    """
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


def _observed(
    path: Path, logs: GivenLogs, records: RunRecords, ranks: int | None
) -> Observed | None:
    """What was observed of the steps: by the pattern, else of jobkit's own lines, else of others.

    A log has the windows of rank 0 alone: of several ranks they say the work only where it is
    stated.
    """
    planned = {n: getattr(logs, n) for n in ("unit", "work_per_step", "warmup_steps")}
    if logs.pattern:
        with open_log(path, _ANYWHERE) as stream:
            return observed_lines(matches(stream, logs.pattern), logs.pattern, ranks, planned)
    windows = observed_windows(records.of("window"), records.last("run_start"), planned, ranks)
    return windows or observed_metrics(records.foreign, ranks, planned, records.copies)


def size_of(path: Path, size: str, per_node: int | None) -> Row:
    """The size of a run: from the name of its log, else from its first MiB; empty if in neither.

    size: the expression; what its group series finds is there too. per_node: GPUs of a full node.
    Raises UsageError where it takes too long.
    """
    expression = regex.compile(size)
    try:
        with open_log(path, _ANYWHERE) as stream:
            head = stream.read(_HEAD).decode("utf-8", "replace")
        texts = [path.name, *head.splitlines()]
        match = next((m for t in texts if (m := expression.search(t, timeout=TIMEOUT_S))), None)
    except OSError:
        return {}
    except TimeoutError:
        raise UsageError(f"--size {size!r}: took longer than {TIMEOUT_S:g} s") from None
    if match is None:
        return {}
    named = {k: v for k, v in match.groupdict().items() if v}
    series = {"series": named.pop("series")} if "series" in named else {}
    numbers = {k: int(v) for k, v in named.items() if v.isdecimal()}
    if (plain := _plain_group(expression)) and (match[plain] or "").isdecimal():
        numbers.setdefault("ranks", int(match[plain]))
    return {**series, **_shape(numbers, per_node)}


def _plain_group(expression: Any) -> int | None:
    """The first group that has no name; none where another one than series has."""
    names = expression.groupindex
    free = [n for n in range(1, expression.groups + 1) if n not in names.values()]
    return free[0] if free and not names.keys() - {"series"} else None


def _shape(numbers: Mapping[str, int], per_node: int | None) -> Row:
    """Nodes, ranks per node and ranks from those of them that are known; 1 node where none is."""
    nodes, ranks = numbers.get("nodes"), numbers.get("ranks")
    on_node = numbers.get("ranks_per_node")
    if not on_node and per_node and bool(nodes) != bool(ranks):
        on_node = min(per_node, ranks or per_node)
    ranks = ranks or ((nodes or 1) * on_node if on_node else None)
    if not ranks or ranks >= 1 << 31:
        return {}
    nodes = nodes or (-(-ranks // on_node) if on_node else 1)
    return {"nodes": nodes, "ranks_per_node": on_node or -(-ranks // nodes), "world_size": ranks}
