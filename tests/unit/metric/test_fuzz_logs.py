"""Ten thousand mangled logs: nothing raises, no record is lost or made up, rejects are exact."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobkit.analysis.collect.records import RunRecords, read_run
from jobkit.metric import line as metric
from jobkit.metric import reader as metric_reader
from jobkit.metric.reader import Rejected
from jobkit.outcome.logs import read_tail
from jobkit.outcome.status import STATUSES, run_state
from jobkit.paths import RunPaths
from support.mangled import RUN_ID, Log, doubled, labelled, line, mangled, packed

LOGS = st.builds(mangled, st.integers(0, 2**64), st.integers(0, 12))
EXAMPLES, LOGS_EACH = 2100, 5  # 10,500 logs


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    folder = tmp_path_factory.mktemp("study") / RUN_ID
    folder.mkdir()
    return RunPaths(folder)


def read(paths: RunPaths, data: bytes, name: str = "train.log") -> RunRecords:
    """What the collector reads of a run that left this log alone; and its state is told."""
    file = paths.folder / name
    file.write_bytes(data)
    try:
        assert run_state(paths).status in STATUSES
        return read_run(paths, RUN_ID)
    finally:
        file.unlink()


def own(found: RunRecords) -> list[dict]:
    return [r for r in found.records if "v" in r]


def foreign(found: RunRecords) -> list[dict]:
    return [r for r in found.records if "v" not in r]


def rejected(found: RunRecords) -> int:
    return sum(r.count for r in found.rejects)


def check(log: Log, found: RunRecords) -> None:
    assert own(found) == log.own
    assert foreign(found) == log.foreign
    assert rejected(found) == log.rejected
    attempts = {r["attempt"] for r in log.own}
    last = {a: max(r["seq"] for r in log.own if r["attempt"] == a) for a in attempts}
    assert found.lost == sum(last.values()) + len(attempts) - len(log.own)


@settings(max_examples=EXAMPLES, deadline=None)
@given(LOGS, st.sampled_from([b"0: ", b"[default1]:", b"2026 | \x1b[32m"]), st.integers(0, 10**9))
def test_a_mangled_log_gives_what_is_whole_in_it(paths, log: Log, label: bytes, at: int) -> None:
    check(log, read(paths, log.data))
    check(doubled(log), read(paths, doubled(log).data))
    check(log, read(paths, packed(log), "train.log.gz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric_reader, "_BLOCK", 1 + at % 300)
        check(labelled(log, label), read(paths, labelled(log, label).data))
    cut = at % (len(log.data) + 1)  # a log that is still being written
    found = read(paths, log.data[:cut])
    assert own(found) == [r for r in log.own if line(r) in log.data[:cut]]
    assert all(r in log.foreign for r in foreign(found))


@settings(max_examples=150, deadline=None)
@given(LOGS, st.integers(0, 10**9), st.sampled_from([b"\x00", b"\xff\x00"]))
def test_a_torn_archive_gives_what_can_be_unpacked(paths, log: Log, at: int, other: bytes) -> None:
    whole = packed(log)
    cut = at % len(whole)
    found = read(paths, whole[:cut], "train.log.gz")
    assert all(r in log.own for r in own(found))
    assert all(r in log.foreign for r in foreign(found))
    # Bytes that are others may unpack to other text: only a checksum tells.
    found = read(paths, whole[:cut] + other + whole[cut + len(other) :], "train.log.gz")
    assert all(r in log.own for r in own(found))


@settings(max_examples=300, deadline=None)
@given(LOGS, st.sampled_from([b"", b'{"v":1,"kind":"ep', b"\x00" * 99]))
def test_a_metrics_file_and_a_damaged_mirror_make_one_whole(paths, log: Log, torn: bytes) -> None:
    """After a full disk the next record follows on a torn one's line."""
    kept = log.own[::2]
    paths.metrics(0).parent.mkdir(exist_ok=True)
    lines = [torn + metric.encode(r).encode() + b"\n" for r in kept]
    paths.metrics(0).write_bytes(b"".join(lines))
    found = read(paths, log.data)
    paths.metrics(0).unlink()
    counts = {Path(r.file).name: r.count for r in found.rejects}
    assert own(found) == log.own
    assert counts.get("0.jsonl", 0) == (len(kept) if torn else 0)
    assert counts.get("train.log", 0) == log.rejected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=30) | st.sampled_from(["", "{}", "\x00", '{"v":1}', "x" * 9])))
def test_a_metrics_file_counts_every_line_that_holds_no_record(lines: list[str]) -> None:
    record = {"v": 1, "kind": "epoch", "run_id": RUN_ID, "attempt": 0, "seq": 0}
    texts = [json.dumps(text).encode() for text in lines]  # never an object, never a newline
    data = b"\n".join([*texts, metric.encode(record).encode(), b""])
    found = list(metric_reader.read_file(io.BytesIO(data)))
    assert found.pop() == record
    assert [type(f) for f in found] == [Rejected] * len(lines)
    assert sum(f.length for f in found if isinstance(f, Rejected)) == sum(len(t) + 1 for t in texts)


def long_line(path: Path, head: bytes, tail: bytes) -> Path:
    """A file of one line of 100 MB between a head and a tail."""
    block = b"x=1 [METRIC " * 87381
    with path.open("wb") as file:
        file.write(head)
        file.writelines([block] * (100_000_000 // len(block) + 1))
        file.write(tail)
    return path


@pytest.mark.parametrize("reader", [metric_reader.scan, metric_reader.read_file])
def test_a_line_of_100_mb_costs_little_memory_and_hides_no_record(tmp_path, reader) -> None:
    record = {"v": 1, "kind": "epoch", "run_id": RUN_ID, "attempt": 0, "seq": 0, "epoch": 3}
    if reader is metric_reader.scan:  # a torn record, a long line, and on it a whole record
        path = long_line(tmp_path / "log", line(record)[:60], line(record) + b"\n")
    else:
        whole = metric.encode(record).encode()
        path = long_line(tmp_path / "log", whole[:60], b"\n" + whole + b"\n")
    tracemalloc.start()
    with path.open("rb") as stream:
        found = list(reader(stream))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(f) for f in found] == [Rejected, dict]
    assert found[1] == record
    assert peak < 8 << 20


def test_the_tail_of_a_log_with_a_100_mb_line_costs_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        file.truncate(100_000_000)
        file.seek(0, 2)
        file.write(b"\nValueError: boom\n")
    tracemalloc.start()
    tail = read_tail(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tail.lines[-2] == (2, "ValueError: boom")
    assert peak < 64 << 20


@pytest.mark.parametrize("name", ["train.log", "train.log.gz"])
@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\0", b"\x1f\x8b", gzip.compress(b"", mtime=0), b"[METRIC]"]
)
def test_hardly_a_log_at_all(paths, name: str, data: bytes) -> None:
    found = read(paths, data, name)
    assert found.records == []
    bad = data == b"[METRIC]" if name == "train.log" else data[:2] != b"\x1f\x8b" or len(data) == 2
    assert rejected(found) == int(bad and data != b"")
