"""Logs that exist already: each file is a run, and no plan says what it was.

What a log cannot say is empty: its settings, its exit code.
"""

import filecmp
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import observed_of, of_tables, result_row
from jobkit.analysis.collect.steps import Observed
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.series import IN_STEPS
from jobkit.errors import ANSI, UsageError
from jobkit.files import MAX_LOG, open_regular, read_tail
from jobkit.metric.pattern import Pattern
from jobkit.outcome.evidence import find_sign, of_newest
from jobkit.outcome.state import BAD_ENDS, RunState

_ANYWHERE = Path("/")  # the user named the files
_MEASURED = r'\[METRIC\] (?:[^{]*(?:step|epoch|iteration|_per_s|_s)=|.*"kind":"(?:epoch|window)")'
_HEAD = 1 << 20  # bytes of a log in which its size is looked for


@dataclass(frozen=True, kw_only=True)
class GivenLogs:
    """Which logs, and how they are read. Raises UsageError for what cannot be used."""

    files: tuple[Path, ...]
    size: str  # an expression with the groups ranks, nodes, series
    pattern: Pattern | None = None  # None: [METRIC] key=value lines
    ranks_per_node: int | None = None  # of a full node
    unit: str | None = None
    work_per_step: float | None = None
    warmup_steps: int = 0
    scaling: str | None = None  # strong or weak, as the user states it

    def __post_init__(self) -> None:
        try:
            names = re.compile(self.size).groupindex.keys()
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"--size {self.size!r} does not compile: {error}") from None
        if names - {"ranks", "nodes", "series"} or not names & {"ranks", "nodes"}:
            why = "name its groups ranks, nodes or series, as 'gpus=(?P<ranks>\\d+)'"
            raise UsageError(f"--size {self.size!r} has no size: {why}")
        if "ranks" not in names and not self.ranks_per_node:
            raise UsageError(f"--size {self.size!r} finds nodes alone: add --gpus-per-node N")


def read_logs(logs: GivenLogs) -> dict[str, dict[str, Any]]:
    """What was read of each log, in the order given."""
    names, runs = Counter(path.name for path in logs.files), dict[str, dict[str, Any]]()
    files = {path.name if names[path.name] == 1 else str(path): path for path in logs.files}
    for run_id, path in files.items():
        run = _read(run_id, path, logs)
        which = "throughput", "series", "world_size", "nodes"
        own = [run["row"].get(name) for name in which] if run["row"].get("throughput") else []
        alike = (k for k in runs if [runs[k]["row"].get(name) for name in which] == own)
        if same := next((k for k in alike if filecmp.cmp(files[k], path, shallow=False)), None):
            runs[same]["problems"].append(f"{run_id}: has the same content as {same}: counted once")
        else:
            runs[run_id] = run
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
    records, pattern, size = read_log(path), logs.pattern, size_of(path, logs)
    series = size.pop("series", None) or (pattern.program or pattern.name if pattern else "log")
    ranks = size.get("world_size")  # of several a log has the windows of rank 0 alone
    observed = observed_of(path, _ANYWHERE, records, logs, pattern, ranks, by_pattern=True)
    row = dict.fromkeys(("nodes", "ranks_per_node", "world_size"))
    row |= result_row(None, RunState(status="ok"), records, observed) | size
    row |= {"attempts": None, "evidence_file": path.name, "scaling": logs.scaling}
    row |= {"series": series, "strategy": series}
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
    if recorded != "ok" and (seen := find_sign(tail)):
        reached = _went_on_to(tail, logs.pattern, row["world_size"] or 1)
        if sign := find_sign(tail, reached) if "throughput" in row else seen:
            return {"status": sign.status, "reason": sign.reason, "evidence": sign.text}
        why = f"training went on after this error, so it did not end the run: {seen.reason}"
        records.problems.append(f"{path.name}: {why}")
    if recorded in BAD_ENDS:
        return {"status": recorded, "reason": str(end.get("reason") or "its last record says so")}
    if "throughput" not in row:
        name = f"line of pattern {logs.pattern.name}" if logs.pattern else "[METRIC] line"
        last = next((line.strip()[:80] for line in reversed(tail) if line.strip()), None)
        why = f"no {name} with a time or a rate; the last line is: {last}"
        why = why if last else "the file is empty"
        known = "; ".join(observed.not_taken) if observed else ""
        return {"status": "failed", "reason": known or why}
    if row["world_size"] is None:
        why = f"no size: {logs.size} finds no number of ranks in it"
        return {"status": "failed", "reason": why}
    unknown = "read from a log: whether it ended well is not known"
    return {"status": "ok", "reason": None if recorded == "ok" else unknown}


def _went_on_to(lines: list[str], pattern: Pattern | None, ranks: int) -> int:
    """The line that training reached. The last one of each rank may stand after another's fall."""
    of_steps = [re.compile(text) for text in (pattern.lines if pattern else (_MEASURED,))]
    at = [i for i, line in enumerate(lines) if any(x.search(ANSI.sub("", line)) for x in of_steps)]
    whole = pattern and pattern.spans == "running"  # said at the end of the training
    late = 0 if whole else max(1, min(ranks, len(at) // 4))  # rank 0 alone may print
    return at[-1 - late] if len(at) > late else 0


def size_of(path: Path, logs: GivenLogs) -> Row:
    """The size of a run, and its series, from its log's name or its first MiB; else empty."""
    try:
        with open_regular(path, MAX_LOG, _ANYWHERE) as stream:
            head = stream.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return {}  # the reader of records says why
    matches = map(re.compile(logs.size).search, (path.name, *head.splitlines()))
    match = next(filter(None, matches), None)
    found = {name: text for name, text in match.groupdict().items() if text} if match else {}
    size: Row = {"series": found.pop("series")} if "series" in found else {}
    numbers = {k: int(text) for k, text in found.items() if text.isdecimal() and len(text) < 10}
    ranks, nodes, per_node = numbers.get("ranks"), numbers.get("nodes"), logs.ranks_per_node
    if per_node and bool(nodes) != bool(ranks):
        ranks = ranks or (nodes or 0) * per_node
        on_node: int | None = min(per_node, ranks)
        nodes = nodes or -(-ranks // per_node)
    elif ranks:
        nodes = nodes or (1 if ranks == 1 else None)
        on_node = -(-ranks // nodes) if nodes else None
    else:
        return size
    return size | {"nodes": nodes, "ranks_per_node": on_node, "world_size": ranks}
