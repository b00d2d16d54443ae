"""The records of one run, from all that it left: metrics/*.jsonl and train.log, packed or not.

The files of metrics/ are the truth and the log is their mirror; either alone is enough. What lies
in both counts once. What no source holds is counted as lost, told by gaps in the sequence numbers.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit import metric
from jobkit.evidence import open_log, torn_archive
from jobkit.metric import Record, Rejected
from jobkit.paths import RunPaths


@dataclass(frozen=True)
class Reject:
    """How many places of a file carry the tag and no whole record; the first, and why."""

    file: str
    count: int
    offset: int  # bytes, of the first
    reason: str  # of the first


@dataclass
class RunRecords:
    """The records of one run: whole ones, and what could not be used."""

    records: list[Record] = field(default_factory=list)  # by attempt and order; parts are joined
    rejects: list[Reject] = field(default_factory=list)
    lost: int = 0

    def of(self, kind: str) -> list[Record]:
        """The records of a kind, oldest first."""
        return [r for r in self.records if r.get("kind") == kind]

    def last(self, kind: str) -> Record:
        """The newest record of a kind; empty where there is none."""
        found = self.of(kind)
        return found[-1] if found else {}

    def epochs(self) -> list[Record]:
        """One record an epoch, in order: of an epoch that was trained again, the newest one."""
        newest: dict[int, Record] = {}
        for record in self.records:
            epoch = record.get("epoch")
            if type(epoch) is not int or record.get("kind", "epoch") != "epoch":
                continue
            # A foreign script may print an epoch's values on several lines.
            before = {} if "v" in record else newest.get(epoch, {})
            newest[epoch] = {**before, **record}
        return [newest[epoch] for epoch in sorted(newest)]


def read_run(paths: RunPaths, run_id: str | None) -> RunRecords:
    """Read all records of a run; those of another run in its files are rejected.

    run_id None takes the records of any run: nothing says whose the folder is.
    """
    found: list[Record] = []
    rejects: list[Reject] = []
    for path in sources(paths):
        records, reject = _read(path, run_id, paths.folder.parent)
        found += records
        rejects += [reject] if reject else []
    own = metric.unique(r for r in found if "v" in r)
    foreign = [r for r in found if "v" not in r]
    return RunRecords(_joined(own) + _once(foreign), rejects, _lost(own))


def sources(paths: RunPaths) -> list[Path]:
    """The files that hold a run's records, the truth first."""
    metrics = [p for n in paths.attempt_numbers() if (p := paths.metrics(n)).is_file()]
    packed = sorted(paths.metrics_folder.glob("*.jsonl.gz"))
    logs = (paths.log, paths.log.with_name(paths.log.name + ".gz"))
    return [*metrics, *packed, *(p for p in logs if p.is_file())]


def _read(path: Path, run_id: str | None, folder: Path) -> tuple[list[Record], Reject | None]:
    """The records of one file, and what of it was rejected."""
    records: list[Record] = []
    bad: list[Rejected] = []
    for item in _items(path):
        if isinstance(item, Rejected):
            bad.append(item)
        elif "v" in item and run_id not in (None, item["run_id"]):
            bad.append(Rejected(0, 0, f"of another run: {item['run_id']}"))
        else:
            records.append(item)
    if not bad:
        return records, None
    name = str(path.relative_to(folder))
    return records, Reject(name, len(bad), bad[0].offset, bad[0].reason)


def _items(path: Path) -> Iterator[Record | Rejected]:
    """The records and the rejected places of a file; a torn archive is one more of these."""
    scan = metric.read_file if ".jsonl" in path.name else metric.scan
    try:
        with open_log(path) as stream:
            yield from scan(stream)
            if fault := torn_archive(stream):
                yield Rejected(0, 0, f"torn archive: {fault}")
    except OSError as error:
        yield Rejected(0, 0, f"cannot be read: {error.strerror or error}")


def _joined(records: list[Record]) -> list[Record]:
    """The records in order, those that were split over several lines as one."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        first = record["seq"] - record.get("part", 0)
        groups[record["attempt"], first, record["kind"]].append(record)
    return [metric.merge_parts(group) for group in groups.values()]


def _once(records: list[Record]) -> list[Record]:
    """Foreign records, each once, in order; rank 0's last, as the last one counts."""
    texts = {json.dumps(r, sort_keys=True): r for r in records}
    return sorted(texts.values(), key=lambda r: r.get("rank") in (0, None))


def _lost(records: list[Record]) -> int:
    """How many records are missing before the last one of each attempt."""
    numbers: dict[int, set[int]] = defaultdict(set)
    for record in records:
        numbers[record["attempt"]].add(record["seq"])
    return sum(max(seen) + 1 - len(seen) for seen in numbers.values())
