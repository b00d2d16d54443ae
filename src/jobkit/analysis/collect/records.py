"""The records of one run, from metrics/*.jsonl and train.log.

The files of metrics/ are the primary source and the log has copies; either alone is enough. A
record in both counts once. Gaps in the sequence numbers are counted as lost records.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import orjson

from jobkit.analysis.collect.lines import ATTEMPT
from jobkit.analysis.tables.text import counted
from jobkit.files import MAX_LOG, closed, file_names, is_regular, open_regular
from jobkit.metric import reader
from jobkit.metric.kinds import Record, epoch_of
from jobkit.paths import RunPaths

# ATTEMPT.jsonl of rank 0; ATTEMPT.rRANK.jsonl, .s and .w: windows, samples and causes of any rank.
_NAME = re.compile(r"([0-9]{1,9})(?:\.[rsw]([0-9]{1,9}))?\.jsonl")
_START = re.compile(ATTEMPT.pattern.encode())


@dataclass
class RunRecords:
    """The records of one run, and what was rejected or lost."""

    records: list[Record] = field(default_factory=list)  # by attempt and order
    of_ranks: list[Record] = field(default_factory=list)  # windows, samples and causes of ranks
    rejected: int = 0  # [METRIC] lines without a record of this run
    lost: int = 0
    problems: list[str] = field(default_factory=list)  # of each file that has some, a sentence
    unreadable: str = ""  # why a file with records could not be read

    def of_all_ranks(self, kind: str) -> list[Record]:
        """Windows, samples or causes of rank 0, and those that ranks recorded in their files."""
        return [r for r in (*self.records, *self.of_ranks) if r.get("kind") == kind and "v" in r]

    def last(self, kind: str) -> Record:
        """The newest record of a kind; empty where there is none."""
        return next((r for r in reversed(self.records) if r.get("kind") == kind), {})

    @property
    def newest(self) -> int | None:
        """The newest attempt."""
        return max((r["attempt"] for r in self.records if "v" in r), default=None)

    @cached_property
    def epochs(self) -> list[Record]:
        """One record per epoch, in order: of an epoch that was trained again, the newest one.

        A line without a checksum does not count where the run recorded its epochs itself.
        """
        newest: dict[int, Record] = {}
        # Of a script's ranks rank 0 has the last word.
        for record in sorted(self.records, key=lambda r: "v" not in r and not r.get("rank")):
            if (epoch := epoch_of(record)) is None or (self.records_epochs and "v" not in record):
                continue
            # A foreign script may print an epoch's values on several lines.
            before = {} if "v" in record else newest.get(epoch, {})
            newest[epoch] = {**before, **record}
        return [newest[epoch] for epoch in sorted(newest)]

    @cached_property
    def records_epochs(self) -> bool:
        """Whether the run records its epochs itself, with checksums: jobkit's own training does."""
        return any(r.get("kind") == "epoch" or "spec" in r for r in self.records if "v" in r)


def read_run(paths: RunPaths, run_id: str | None) -> RunRecords:
    """Read all records of a run; those of another run in its files are rejected.

    run_id None takes the records of any run: the folder has no spec.json.
    """
    study, found, records = paths.folder.parent, RunRecords(), list[Record]()
    named = [match for name in file_names(paths.metrics_folder) if (match := _NAME.fullmatch(name))]
    named.sort(key=lambda match: (int(match[1]), int(match[2] or 0)))
    files = [(paths.metrics_folder / match[0], match[2]) for match in named]
    files = [(path, rank) for path, rank in (*files, (paths.log, None)) if is_regular(path)]
    if all(path == paths.log for path, _ in files) and (why := closed(paths.metrics_folder)):
        _cannot_read(found, str(paths.metrics_folder.relative_to(study)), why)
    for path, rank in files:
        name = str(path.relative_to(study))
        of_file = _read(found, path, name, run_id, study)
        if rank is None:
            records += of_file
        else:
            found.of_ranks += reader.unique([r for r in of_file if "v" in r])
    return _whole(found, records)


def read_log(path: Path) -> RunRecords:
    """Read all records of a log that lies anywhere; of several runs those of the first."""
    found = RunRecords()
    records = _read(found, path, path.name, None, Path("/"))  # the user named it
    end = _end_of_first(records)
    if later := len(records) - end:
        _reject(found, path.name, later, "of a second run in this log: the first one is read")
    return _whole(found, records[:end])


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
            again = epoch < newest and any(known[name] != record[name] for name in names)
            newest = max(newest, epoch)
        else:
            continue
        if again:
            return place
    return len(records)


def _read(
    found: RunRecords, path: Path, name: str, run_id: str | None, within: Path
) -> list[Record]:
    """The records of one file. Its rejected lines are counted in found: the first alone is told."""
    scan = partial(reader.scan, start=_START)
    records, rejected = list[Record](), list[str]()
    try:
        with open_regular(path, MAX_LOG, within) as stream:
            read = reader.read_file if path.suffix == ".jsonl" else scan
            for item in read(stream, loads=orjson.loads):
                if isinstance(item, str):
                    rejected.append(item)
                elif "v" in item and run_id not in (None, item["run_id"]):
                    rejected.append(f"of another run: {item['run_id']}")
                else:
                    records.append(item)
    except OSError as error:
        _cannot_read(found, name, error.strerror or str(error), len(rejected) + 1)
        return records
    if rejected:
        _reject(found, name, len(rejected), rejected[0])
    return records


def _reject(found: RunRecords, name: str, count: int, first: str) -> None:
    found.rejected += count
    found.problems.append(f"{name}: {counted(count, '[METRIC] line')} rejected, the first: {first}")


def _cannot_read(found: RunRecords, name: str, why: str, count: int = 1) -> None:
    # What is behind the place that cannot be read may be all that counts.
    found.rejected += count
    found.unreadable = f"cannot be read: {why}"
    found.problems.append(f"{name} {found.unreadable}")


def _whole(found: RunRecords, records: list[Record]) -> RunRecords:
    """The run with its records in order, each once, and how many are missing in each attempt."""
    recorded = reader.unique([r for r in records if "v" in r])
    last = {record["attempt"]: record["seq"] for record in recorded}
    found.lost = sum(last.values()) + len(last) - len(recorded)
    found.records = recorded + [r for r in records if "v" not in r]
    return found
