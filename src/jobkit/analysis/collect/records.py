"""The records of one run, from metrics/*.jsonl and train.log.

The files of metrics/ are the primary source and the log has copies; either alone is enough. A
record in both counts once. Gaps in the sequence numbers are counted as lost records.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import orjson

from jobkit.analysis.collect.lines import ATTEMPT, with_numbers
from jobkit.files import closed, file_names, is_regular
from jobkit.metric import reader
from jobkit.metric.kinds import Record
from jobkit.metric.reader import Rejected
from jobkit.outcome.logs import open_log
from jobkit.paths import RunPaths

UNREADABLE = "cannot be read: "  # begins the reason of such a file
# ATTEMPT.jsonl of rank 0; ATTEMPT.rRANK.jsonl, .s and .w: windows, samples and causes of any rank.
_NAME = re.compile(r"([0-9]{1,9})(?:\.[rsw]([0-9]{1,9}))?\.jsonl")
_START = re.compile(ATTEMPT.pattern.encode())


@dataclass(frozen=True)
class Reject:
    """The rejected [METRIC] lines of a file: how many, where the first is, and why."""

    file: str
    count: int
    offset: int | None  # bytes, of the first; None: not of one place
    reason: str  # of the first


@dataclass
class RunRecords:
    """The records of one run, and what was rejected or lost."""

    records: list[Record] = field(default_factory=list)  # by attempt and order
    rejects: list[Reject] = field(default_factory=list)
    lost: int = 0
    of_ranks: list[Record] = field(default_factory=list)  # windows, samples and causes of ranks

    def of(self, kind: str) -> list[Record]:
        """The records of a kind, oldest first."""
        return self._by_kind.get(kind, [])

    def of_all_ranks(self, kind: str) -> list[Record]:
        """The same, and those that ranks recorded in files of their own."""
        return [*self.of(kind), *(r for r in self.of_ranks if r["kind"] == kind)]

    @property
    def unreadable(self) -> bool:
        """Whether a file with records could not be read at all."""
        return any(r.reason.startswith(UNREADABLE) for r in self.rejects)

    @cached_property
    def _by_kind(self) -> dict[str, list[Record]]:
        by_kind: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            by_kind[str(record.get("kind"))].append(record)
        return by_kind

    def last(self, kind: str) -> Record:
        """The newest record of a kind; empty where there is none."""
        return (self.of(kind) or [{}])[-1]

    @property
    def newest(self) -> int | None:
        """The newest attempt."""
        return max((r["attempt"] for r in self.records if "v" in r), default=None)

    @property
    def foreign(self) -> list[Record]:
        """The key=value lines, which have no checksum."""
        return [r for r in self.records if "v" not in r]

    @cached_property
    def epochs(self) -> list[Record]:
        """One record per epoch, in order: of an epoch that was trained again, the newest one.

        What an attempt did beyond the checkpoint from which a later one continued does not count,
        nor does a line without a checksum where the run recorded its epochs itself.
        """
        newest: dict[int, Record] = {}
        undone = self._undone()
        # Of a script's ranks rank 0 has the last word.
        for record in sorted(self.records, key=lambda r: "v" not in r and not r.get("rank")):
            if (epoch := epoch_of(record)) is None or (self.records_epochs and "v" not in record):
                continue
            attempt = record.get("attempt", 0)
            if undone and type(attempt) is int and epoch >= undone.get(attempt, math.inf):
                continue
            # A foreign script may print an epoch's values on several lines.
            before = {} if "v" in record else newest.get(epoch, {})
            newest[epoch] = {**before, **record}
        return [newest[epoch] for epoch in sorted(newest)]

    @cached_property
    def records_epochs(self) -> bool:
        """Whether the run records its epochs itself, with checksums: jobkit's own training does."""
        return any(r.get("kind") == "epoch" or "spec" in r for r in self.records if "v" in r)

    def _undone(self) -> dict[int, int]:
        """By attempt, the first of its epochs that a later attempt trained again."""
        begun = {r["attempt"]: 0 for r in self.of("startup") if "v" in r}
        for record in self.of("checkpoint"):
            loaded = "v" in record and record.get("action") == "loaded"
            if loaded and record["attempt"] in begun and type(record.get("epoch")) is int:
                begun[record["attempt"]] = record["epoch"]
        return {
            attempt: min(later)
            for attempt in {r["attempt"] for r in self.records if "v" in r}
            if (later := [epoch for other, epoch in begun.items() if other > attempt])
        }


def epoch_of(record: Record) -> int | None:
    """The epoch that a record is about; None for a record of steps or of another kind."""
    epoch = record.get("epoch")
    if type(epoch) is not int or record.get("kind", "epoch") != "epoch":
        return None
    return None if "v" not in record and "step" in record else epoch


def read_run(paths: RunPaths, run_id: str | None) -> RunRecords:
    """Read all records of a run; those of another run in its files are rejected.

    run_id None takes the records of any run: the folder has no spec.json.
    """
    study = paths.folder.parent
    records: list[Record] = []
    of_ranks: list[Record] = []
    rejects: list[Reject] = []
    seen: set[bytes] = set()  # the log has copies of these: nothing is decoded twice
    named = [match for name in file_names(paths.metrics_folder) if (match := _NAME.fullmatch(name))]
    named.sort(key=lambda match: (int(match[1]), int(match[2] or 0)))
    files = [(paths.metrics_folder / match[0], match[2]) for match in named]
    files = [(path, rank) for path, rank in (*files, (paths.log, None)) if is_regular(path)]
    if all(path == paths.log for path, _ in files) and (why := closed(paths.metrics_folder)):
        name = str(paths.metrics_folder.relative_to(study))
        rejects.append(Reject(name, 1, None, f"{UNREADABLE}{why}"))
    for path, rank in files:
        of_file, reject = _read(path, run_id, study, seen if rank is None else None)
        if rank is None:
            records += of_file
        else:
            of_ranks += reader.unique([r for r in of_file if "v" in r])
        rejects += [reject] if reject else []
    return _whole(records, rejects, of_ranks)


def read_log(path: Path) -> RunRecords:
    """Read all records of a log that lies anywhere; of several runs those of the first."""
    path = path.absolute()
    records, reject = _read(path, None, Path("/"), None)  # the user named it
    rejects = [replace(reject, file=path.name)] if reject else []
    end = _end_of_first(records)
    if later := len(records) - end:
        why = "of a second run in this log: the first one is read"
        rejects.append(Reject(path.name, later, None, why))
    return _whole(records[:end], rejects, [])


def _end_of_first(records: list[Record]) -> int:
    """How many records are of the first run in a log.

    Outside a study runs may have no names: another one begins where an attempt begins again, or
    where an earlier epoch of key=value lines comes again with other values. A copy is none.
    """
    first: dict[object, Record] = {}
    newest = -1
    for place, record in enumerate(records):
        if "v" in record:
            again = record["run_id"] != first.setdefault("run", record)["run_id"]
            if record["kind"] == "run_start" and record["seq"] == 0:
                again |= first.setdefault(record["attempt"], record) != record
        elif (epoch := epoch_of(record)) is not None:
            known = first.setdefault(("epoch", epoch, record.get("rank")), record)
            names = known.keys() & record.keys() - {"attempt"}
            changed = any(known[name] != record[name] for name in names)
            again = epoch < newest and changed
            newest = max(newest, epoch)
        else:
            continue
        if again:
            return place
    return len(records)


def _read(
    path: Path, run_id: str | None, folder: Path, seen: set[bytes] | None
) -> tuple[list[Record], Reject | None]:
    """The records of one file, and its rejected lines: of thousands of them, the first alone."""
    records: list[Record] = []
    first: Rejected | None = None
    count = 0
    for item in _items(path, folder, seen):
        if isinstance(item, Rejected):
            reject = item
        elif "v" in item and run_id not in (None, item["run_id"]):
            reject = Rejected(-1, 0, f"of another run: {item['run_id']}")
        else:
            records.append(item if "v" in item else with_numbers(item))
            continue
        count += 1
        # What is behind the place that cannot be read may be all that counts.
        first = reject if reject.reason.startswith(UNREADABLE) else first or reject
    if first is None:
        return records, None
    offset = first.offset if first.offset >= 0 else None
    return records, Reject(str(path.relative_to(folder)), count, offset, first.reason)


def _items(path: Path, study: Path, seen: set[bytes] | None) -> Iterator[Record | Rejected]:
    """The records and the rejected lines of a file; one more of these where it cannot be read."""
    try:
        with open_log(path, study) as stream:
            if path.suffix == ".jsonl":
                yield from reader.read_file(stream, seen=seen, loads=orjson.loads)
            else:
                yield from reader.scan(stream, seen=seen, loads=orjson.loads, start=_START)
    except OSError as error:
        yield Rejected(-1, 0, f"{UNREADABLE}{error.strerror or error}")


def _whole(records: list[Record], rejects: list[Reject], of_ranks: list[Record]) -> RunRecords:
    """The records of a run in order, each once, and how many are missing in each attempt."""
    recorded = reader.unique([r for r in records if "v" in r])
    last = {record["attempt"]: record["seq"] for record in recorded}
    lost = sum(last.values()) + len(last) - len(recorded)
    foreign = [r for r in records if "v" not in r]
    return RunRecords(recorded + foreign, rejects, lost, of_ranks)
