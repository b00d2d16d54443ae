"""The [METRIC] line: the writer's promises, and the reader's under every noise that logs have."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobkit.metric import line as metric
from jobkit.metric import reader as metric_reader
from jobkit.metric.line import MAX_LINE_BYTES, TAG, MetricWriter
from jobkit.metric.reader import Rejected

TEXTS = st.text(max_size=40) | st.sampled_from(["a=1 b=2", TAG, '"}', "x\ny", "\x1b[0m", "�"])
VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS
VALUES |= st.floats(allow_nan=False, allow_infinity=False)
BODIES = st.dictionaries(st.sampled_from(["epoch", "val_loss", "text", "ä"]), VALUES, max_size=4)
PREFIXES = st.sampled_from(
    ["", "3: ", "12: ", "[default0]:", "[rank1]: ", "\x1b[32m", "\r", "50%\r", "2026-01-01 | "]
)
# Noise that holds no tag; a lone newline ends whatever was begun.
JUNK = st.binary(max_size=60).filter(lambda b: b"METRIC" not in b)


def record(seq: int, **fields: object) -> dict:
    head = {"v": 1, "kind": "epoch", "study": "s", "run_id": "r", "attempt": 0, "rank": 0}
    return {**head, "seq": seq, "t": 1.5, **fields}


def line(content: dict) -> bytes:
    return f"{TAG} {metric.encode(content)}".encode()


def read(data: bytes) -> tuple[list[dict], list[Rejected]]:
    found = list(metric_reader.scan(io.BytesIO(data)))
    return [f for f in found if isinstance(f, dict)], [f for f in found if isinstance(f, Rejected)]


def plain(content: dict) -> dict:
    return json.loads(json.dumps(content))


@st.composite
def noisy_logs(draw: st.DrawFn) -> tuple[list[dict], bytes]:
    """Whole records in order, with noise around each, and the log that they make."""
    bodies = draw(st.lists(BODIES, max_size=5))
    records = [record(i, **body) for i, body in enumerate(bodies)]
    log = draw(JUNK)
    for content in records:
        whole = line(content)
        before = draw(st.sampled_from(["newline", "same line", "torn", "torn on the line"]))
        if before.startswith("torn"):
            cut = st.sampled_from([0, 3, len(TAG), len(TAG) + 1]) | st.integers(0, len(whole) - 1)
            log += whole[: draw(cut)]
        if before in ("newline", "torn"):
            log += b"\n" + draw(JUNK) + b"\n"
        log += draw(PREFIXES).encode() + whole + draw(st.sampled_from([b"", b"\x1b[0m", b"\r"]))
        if draw(st.booleans()):
            log += b"\n"
    return records, log


@settings(max_examples=300, deadline=None)
@given(noisy_logs())
def test_every_whole_record_is_read_and_none_is_altered(case: tuple[list[dict], bytes]) -> None:
    records, log = case
    found, _ = read(log)
    assert [f for f in found if "v" in f] == [plain(r) for r in records]


@settings(max_examples=200, deadline=None)
@given(BODIES, st.data())
def test_a_record_with_a_byte_missing_or_changed_is_rejected(body: dict, data: st.DataObject):
    whole = line(record(0, **body))
    start = len(TAG) + 1
    at = data.draw(st.integers(start, len(whole) - 1))
    changed = data.draw(st.sampled_from([b"", b"7", b"x", b'"', b"\xff"]))
    broken = whole[:at] + changed + whole[at + 1 :]
    found, rejected = read(broken + b"\n")
    if broken == whole:
        return
    assert found in ([], [plain(record(0, **body))])  # whole again: the changed byte said the same
    assert found or rejected


@given(st.lists(BODIES, min_size=1, max_size=4), st.integers(1, 9))
def test_any_block_size_gives_the_same(bodies: list[dict], size: int) -> None:
    log = b"\n".join(line(record(i, **b)) for i, b in enumerate(bodies)) + b"\n"
    block, metric_reader._BLOCK = metric_reader._BLOCK, size
    try:
        small = read(log)
    finally:
        metric_reader._BLOCK = block
    assert small == read(log)
    assert len(small[0]) == len(bodies)


def _sealed(content: dict) -> bytes:
    return metric.encode(content).encode()


# What a metrics file may hold: records, and what looks like one.
FILE_LINES = st.sampled_from(
    [
        *[_sealed(record(i, train_loss=i / 7)) for i in range(4)],
        _sealed(record(4, part=0, parts=2)),
        _sealed(record(5, part=9, parts=2)),  # a part that is none of its record's
        _sealed(record(6, attempt="0")),
        _sealed({"v": 1, "kind": "epoch"}),
        _sealed({"kind": "epoch", "v": 1}),
        _sealed(record(7))[:-9],
        _sealed(record(8))[:-9] + _sealed(record(9)),
        b"",
        b"x" * 70_000,
        b"x" * 70_000 + _sealed(record(9)),
        b"epoch=3 train_loss=0.5",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FILE_LINES, max_size=9), st.sampled_from([b"", TAG.encode() + b" "]), st.booleans())
def test_line_by_line_or_many_at_once_gives_the_same(
    lines: list[bytes], tag: bytes, ended: bool
) -> None:
    data = b"\n".join(tag + line for line in lines) + b"\n" * ended
    reader = metric_reader.scan if tag else metric_reader.read_file
    block, found = metric_reader._BLOCK, []
    try:
        for metric_reader._BLOCK in (100, 100_000, block):
            for seen in (None, {_sealed(record(1, train_loss=1 / 7))}):
                items = list(reader(io.BytesIO(data), seen=seen))
                found.append((seen is None or len(seen), items))
    finally:
        metric_reader._BLOCK = block
    assert found[:2] == found[2:4] == found[4:]


def test_many_at_once_are_found_and_a_fault_among_them_is_told() -> None:
    lines = [line(record(i)) for i in range(3000)]  # more than a block
    lines[1700] = lines[1700][:-20]
    found, rejected = read(b"\nplain\n".join(lines) + b"\n")
    assert [f["seq"] for f in found] == [i for i in range(3000) if i != 1700]
    offset = sum(len(one) + len("\nplain\n") for one in lines[:1700])
    assert [r.offset for r in rejected] == [offset]


def test_duplicates_count_once_and_the_first_one_wins() -> None:
    one, two = record(0, val_loss=1.0), record(0, val_loss=2.0)
    assert metric_reader.unique([one, two, one, record(1)]) == [one, record(1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[METRIC] epoch=3 val_loss=0.5", [{"epoch": 3, "val_loss": 0.5}]),
        ("7: [METRIC] epoch=3 loss=nan", [{"epoch": 3, "loss": None}]),
        ('[METRIC] name="two words" n=1', [{"name": "two words", "n": 1}]),
        ("\x1b[1m[METRIC]\x1b[0m epoch=1 loss=2\x1b[0m", [{"epoch": 1, "loss": 2}]),
        ("[METRIC] epoch=1 a=2 [METRIC] epoch=2 a=3", [{"epoch": 1, "a": 2}, {"epoch": 2, "a": 3}]),
        ('[METRIC] {"epoch": 1, "loss": 0.25}', [{"epoch": 1, "loss": 0.25}]),
        ("[METRIC] nothing here", []),
    ],
)
def test_foreign_lines_are_read(text: str, expected: list[dict]) -> None:
    found, rejected = read(text.encode() + b"\n")
    assert found == expected
    assert bool(rejected) == (not expected)


def test_a_foreign_line_with_no_end_is_rejected() -> None:
    found, rejected = read(b"[METRIC] epoch=3 val_loss=0.5")
    assert (found, len(rejected)) == ([], 1)
    found, rejected = read(b"[METRIC] epoch=3 val_lo" + line(record(0)) + b"\n")
    assert (found, len(rejected)) == ([record(0)], 1)


def test_rejected_places_are_told_with_offset_and_reason() -> None:
    torn = line(record(0, val_loss=1.0))[:-9]
    _, rejected = read(b"hello\n" + torn + b"\n" + line(record(1)) + b"\n")
    assert [(r.offset, r.reason) for r in rejected] == [(6, "truncated or not JSON")]


def write_all(tmp_path, *records: tuple[str, dict]) -> tuple[bytes, bytes]:
    log = io.StringIO()
    path = tmp_path / "metrics" / "0.jsonl"
    writer = MetricWriter(study="s", run_id="r", attempt=0, rank=0, path=path, log=log)
    for kind, fields in records:
        writer.write(kind, **fields)
    writer.close()
    return path.read_bytes(), log.getvalue().encode()


WILD = st.text(max_size=3000) | st.floats() | st.integers() | st.none()


@settings(max_examples=60, deadline=None)
@given(spec=st.dictionaries(st.text(max_size=30), WILD, max_size=30), nodes=st.text(max_size=4000))
def test_no_line_is_longer_than_srun_takes(tmp_path_factory, spec: dict, nodes: str) -> None:
    file, log = write_all(
        tmp_path_factory.mktemp("w"), ("run_start", {"spec": spec, "node_list": nodes})
    )
    assert max(len(text) + 1 for text in log.splitlines()) <= MAX_LINE_BYTES
    found, rejected = read(log)
    assert not rejected
    assert found == list(metric_reader.read_file(io.BytesIO(file)))
    assert [f["seq"] for f in found] == list(range(len(found)))


def test_what_was_split_is_one_again(tmp_path) -> None:
    spec = {f"setting_{i}": i * 1.25 for i in range(80)}
    _, log = write_all(tmp_path, ("run_start", {"spec": spec, "world_size": 4}))
    found, _ = read(log)
    assert len(found) > 1
    whole = metric_reader.merge_parts(found)
    assert (whole["spec"], whole["world_size"]) == (spec, 4)


def test_nan_and_infinity_are_null(tmp_path) -> None:
    file, log = write_all(tmp_path, ("epoch", {"val_loss": math.nan, "lr": math.inf, "epoch": 1}))
    assert not re.search(rb"NaN|Infinity", file + log)
    assert read(log)[0][0]["val_loss"] is None


def test_numbers_keep_their_full_precision(tmp_path) -> None:
    value = 0.1 + 0.2
    _, log = write_all(tmp_path, ("epoch", {"val_loss": value}))
    assert read(log)[0][0]["val_loss"] == value


def test_a_full_disk_leaves_no_half_of_a_record(tmp_path: Path) -> None:
    import resource
    import signal

    writer = MetricWriter(
        study="s", run_id="r", attempt=0, rank=0, path=tmp_path / "0.jsonl", log=io.StringIO()
    )
    writer.write("startup", total_s=1.0)
    whole = (tmp_path / "0.jsonl").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"space|large"):
            writer.write("startup", total_s=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "0.jsonl").read_bytes() == whole
    writer.write("startup", total_s=3.0)
    assert (tmp_path / "0.jsonl").read_bytes().count(b"\n") == 2
