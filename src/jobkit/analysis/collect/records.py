"""The records of one run, from metrics/*.jsonl and train.log.

The files of metrics/ are the primary source and the log has copies; either alone is enough. A
record in both counts once. Gaps in the sequence numbers are counted as lost records.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low

import orjson

from jobkit.analysis.collect.lines import with_numbers
from jobkit.files import closed, file_names, is_regular
from jobkit.metric import reader
from jobkit.metric.kinds import Record
from jobkit.metric.reader import Rejected
from jobkit.outcome.logs import open_log
from jobkit.paths import RunPaths

UNREADABLE = "cannot be read: "  # begins the reason of such a file
_OF_RANK = re.compile(r"([0-9]{1,9})\.[rsw]([0-9]{1,9})\.jsonl")


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
    others: list[Record] = field(default_factory=list)  # windows of the ranks above 0
    samples: list[Record] = field(default_factory=list)  # of their machines, by all ranks
    whys: list[Record] = field(default_factory=list)  # of profiled steps, by all ranks
    copies: int = 1  # how often the key=value line of a step was printed

    def of(self, kind: str) -> list[Record]:
        """The records of a kind, oldest first."""
        return self._by_kind.get(kind, [])

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
        undone, by_itself = self._undone(), self._records_epochs
        for record in self.records:
            if (epoch := _epoch(record)) is None or (by_itself and "v" not in record):
                continue
            if undone and epoch >= undone.get(_attempt(record), math.inf):
                continue
            # A foreign script may print an epoch's values on several lines.
            before = {} if "v" in record else newest.get(epoch, {})
            newest[epoch] = {**before, **record}
        return [newest[epoch] for epoch in sorted(newest)]

    @property
    def epochs_not_taken(self) -> int:
        """Lines without a checksum that name an epoch, beside epochs that the run recorded."""
        if not self._records_epochs:
            return 0
        return sum("v" not in r and _epoch(r) is not None for r in self.records)

    @cached_property
    def _records_epochs(self) -> bool:
        """Whether the run records its epochs itself, with checksums: jobkit's own training does."""
        return any(r.get("kind") == "epoch" or "spec" in r for r in self.records if "v" in r)

    def _undone(self) -> dict[int, int]:
        """By attempt, the first of its epochs that a later attempt trained again."""
        loaded = {
            r["attempt"]: epoch
            for r in self.of("checkpoint")
            if r.get("action") == "loaded" and "v" in r and type(epoch := r.get("epoch")) is int
        }
        starts = [r["attempt"] for r in self.of("startup") if "v" in r]
        begun = {attempt: loaded.get(attempt, 0) for attempt in starts}
        if len(begun) < 2 and not any(begun):
            return {}  # there was one attempt
        return {
            attempt: min(later)
            for attempt in set(map(_attempt, self.records))
            if (later := [epoch for other, epoch in begun.items() if other > attempt])
        }


def _epoch(record: Record) -> int | None:
    """The epoch that a record is about; None for a record of steps or of another kind."""
    epoch = record.get("epoch")
    if type(epoch) is not int or record.get("kind", "epoch") != "epoch":
        return None
    return None if "v" not in record and "step" in record else epoch


def _attempt(record: Record) -> int:
    """A record's attempt; a foreign one may carry anything."""
    attempt = record.get("attempt", 0)
    return attempt if type(attempt) is int else 0


def read_run(paths: RunPaths, run_id: str | None) -> RunRecords:
    """Read all records of a run; those of another run in its files are rejected.

    run_id None takes the records of any run: the folder has no spec.json.
    """
    records: list[Record] = []
    rejects: list[Reject] = []
    seen: set[bytes] = set()  # the log has copies of these: nothing is decoded twice
    names = file_names(paths.metrics_folder)
    plain = [name for name in names if name.endswith(".jsonl") and name[:-6].isdecimal()]
    files = [paths.metrics_folder / n for n in sorted(plain, key=lambda n: int(n[:-6]))]
    files = [path for path in (*files, paths.log) if is_regular(path)]
    if files in ([], [paths.log]) and (why := closed(paths.metrics_folder)):
        name = str(paths.metrics_folder.relative_to(paths.folder.parent))
        rejects.append(Reject(name, 1, None, f"{UNREADABLE}{why}"))
    for path in files:
        of_file, reject = _read(path, run_id, paths.folder.parent, seen)
        records += of_file
        rejects += [reject] if reject else []
    recorded = reader.unique([r for r in records if "v" in r])
    foreign = [r for r in records if "v" not in r]
    # The files of windows (ATTEMPT.rRANK.jsonl), samples (.s) and causes (.w) of other ranks.
    of_rank = [(int(m[1]), int(m[2]), name) for name in names if (m := _OF_RANK.fullmatch(name))]
    others: dict[str, list[Record]] = {"window": [], "sample": [], "why": []}
    for path in (paths.metrics_folder / name for *_, name in sorted(of_rank)):
        if not is_regular(path):
            continue
        of_file, reject = _read(path, run_id, paths.folder.parent, set())
        for record in reader.unique([r for r in of_file if "v" in r]):
            if record["kind"] in others:
                others[record["kind"]].append(record)
        rejects += [reject] if reject else []
    # Foreign records without copies; rank 0's come last, as the last one counts.
    once = {json.dumps(r, sort_keys=True): r for r in foreign}.values()
    of_ranks = (others["window"], others["sample"], others["why"])
    records = recorded + sorted(once, key=lambda r: r.get("rank") in (0, None))
    return RunRecords(records, rejects, _lost(recorded), *of_ranks, _copies(foreign))


def read_log(path: Path) -> RunRecords:
    """Read all records of a log that lies anywhere; of several runs those of the first.

    Outside a study runs have no names: another one begins where an attempt begins again, or where
    the epochs of key=value lines do.
    """
    path = path.absolute()
    records, reject = _read(path, None, Path("/"), set())
    runs = dict.fromkeys(r["run_id"] for r in records if "v" in r)
    if len(runs) > 1:
        records, reject = _read(path, next(iter(runs)), Path("/"), set())
    rejects = [replace(reject, file=path.name)] if reject else []
    if (end := _second_run(records)) is not None:
        why = "of a second run in this log: the first one is read"
        rejects.append(Reject(path.name, len(records) - end, None, why))
        records = records[:end]
    recorded = reader.unique([r for r in records if "v" in r])
    foreign = [r for r in records if "v" not in r]
    return RunRecords(recorded + foreign, rejects, _lost(recorded), copies=_copies(foreign))


def _second_run(records: list[Record]) -> int | None:
    """Where another run begins: an attempt's first record comes again and is another one.

    Of key=value lines where an earlier epoch comes again with another value.
    """
    first: dict[object, Record] = {}
    newest = -1
    for place, record in enumerate(records):
        begins = record.get("kind") == "run_start" and "v" in record and record["seq"] == 0
        if begins and first.setdefault(record["attempt"], record) != record:
            return place
        if "v" in record or (epoch := _epoch(record)) is None:
            continue
        known = first.setdefault(("epoch", epoch, record.get("rank")), record)
        changed = any(known[name] != record[name] for name in known.keys() & record.keys())
        if epoch < newest and changed:
            return place
        newest = max(newest, epoch)
    return None


def _copies(foreign: list[Record]) -> int:
    """How often the line of a step was printed, as by each rank, in most cases."""
    steps = (r for r in foreign if type(r.get("step")) is int)
    places = Counter((r.get("epoch"), r["step"], *sorted(r.keys() - {"rank"})) for r in steps)
    return median_low(places.values()) if places else 1


def _read(
    path: Path, run_id: str | None, folder: Path, seen: set[bytes]
) -> tuple[list[Record], Reject | None]:
    """The records of one file, and its rejected lines."""
    records: list[Record] = []
    name = str(path.relative_to(folder))
    bad: Reject | None = None  # of thousands of them, the first alone
    for item in _items(path, folder, seen):
        if isinstance(item, Rejected):
            reject = Reject(name, 1, item.offset if item.offset >= 0 else None, item.reason)
        elif "v" in item and run_id not in (None, item["run_id"]):
            reject = Reject(name, 1, None, f"of another run: {item['run_id']}")
        else:
            records.append(item if "v" in item else with_numbers(item))
            continue
        # What is behind the place that cannot be read may be all that counts.
        first = bad if bad and not reject.reason.startswith(UNREADABLE) else reject
        bad = replace(first, count=bad.count + 1 if bad else 1)
    return records, bad


def _items(path: Path, study: Path, seen: set[bytes]) -> Iterator[Record | Rejected]:
    """The records and the rejected lines of a file; one more of these where it cannot be read."""
    scan = reader.read_file if ".jsonl" in path.name else reader.scan
    try:
        with open_log(path, study) as stream:
            yield from scan(stream, seen=seen, loads=orjson.loads)
    except OSError as error:
        yield Rejected(-1, 0, f"{UNREADABLE}{error.strerror or error}")


def _lost(records: list[Record]) -> int:
    """How many records are missing before the last one of each attempt."""
    last = {record["attempt"]: record["seq"] for record in records}  # they are in order
    return sum(last.values()) + len(last) - len(records)
