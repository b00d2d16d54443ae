"""The [METRIC] line: what the writer writes, and what the reader takes of a log or rejects."""

import io
import math
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.analysis.collect.records import read_run
from jobkit.metric import reader
from jobkit.metric.reader import read_file, scan
from jobkit.paths import RunPaths
from jobkit.program.lines import MAX_LINE_BYTES, TAG, Writer, encode


def record(seq: int, **fields: object) -> dict[str, Any]:
    head = {"v": 1, "kind": "epoch", "study": "s", "run_id": "r", "attempt": 0, "rank": 0}
    return {**head, "seq": seq, "t": 1.5, **fields}


def line(seq: int, **fields: object) -> bytes:
    return f"{TAG} {encode(record(seq, **fields))}\n".encode()


def read(data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a log, and the reasons of what was rejected."""
    stream = io.BytesIO(data if isinstance(data, bytes) else data.encode())
    found = list(scan(stream, loads=orjson.loads))  # as collect does
    return [f for f in found if isinstance(f, dict)], [f for f in found if isinstance(f, str)]


# The writer.


def write(folder: Path, kind: str, **fields: Any) -> tuple[bytes, str]:
    log, path = io.StringIO(), folder / "metrics" / "0.jsonl"
    writer = Writer(study="s", run_id="r", attempt=0, rank=0, path=path, log=log)
    writer.write(kind, **fields)
    writer.close()
    return path.read_bytes(), log.getvalue()


def test_numbers_keep_their_full_precision_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    values = {"epoch": 1, "train_loss": 0.1 + 0.2, "val_loss": math.nan, "lr": -math.inf}
    file, log = write(tmp_path, "epoch", **values)
    ((found,), rejected) = read(log)
    assert not rejected and list(read_file(io.BytesIO(file))) == [found]
    assert found["train_loss"] == 0.1 + 0.2
    assert (found["val_loss"], found["lr"], found["epoch"]) == (None, None, 1)


@pytest.mark.parametrize(("name", "size"), [("versions", 1), ("node_list", 60), ("versions", 300)])
def test_a_long_record_is_whole_in_its_file_and_short_in_the_log(tmp_path, name, size) -> None:
    table = {f"{i}\u00e4": i / 3 for i in range(size)}
    value: Any = table if name == "versions" else "\u00e4" * 20 * size
    fields = {"spec": {"epochs": 3}, name: value, "world_size": 4}
    file, log = write(tmp_path, "run_start", **fields)
    (whole,) = read_file(io.BytesIO(file))
    ((copy,), rejected) = read(log)
    assert isinstance(whole, dict) and not rejected and len(log) <= MAX_LINE_BYTES
    assert {k: whole[k] for k in fields} == fields
    assert (copy["world_size"], copy["spec"], copy["seq"]) == (4, {"epochs": 3}, 0)
    if size < 60:
        assert copy == whole
    else:
        assert name not in copy
    paths = RunPaths(tmp_path)
    paths.log.write_text(log)
    found = read_run(paths, "r")
    assert (found.records, found.problems, found.lost) == ([whole], [], 0)


@pytest.mark.parametrize("text", ["a\nb", f"{TAG} epoch=8", "\x00\x1b[m", '","crc":"0"}', "\ud800"])
def test_a_record_is_one_line_with_one_tag_whatever_its_text(tmp_path: Path, text: str) -> None:
    file, log = write(tmp_path, "message", level="info", text=text)
    assert (file.count(b"\n"), log.count("\n"), log.count(TAG)) == (1, 1, 1)
    assert read(log)[0][0]["text"] == text


# Records with a checksum.

JUNK = [b"epoch 3: fine\n", b"\x00\xff\xfe", b"\x1b[32m", b"50%|#  |\r", b"[MET", b"METRIC] a=9\n"]


@given(st.lists(st.sampled_from(["whole", "torn", "foreign", "empty", *JUNK])), st.randoms())
def test_what_is_whole_is_found_and_nothing_is_made_up(kinds: list[Any], random) -> None:
    """A log as srun, tee, a crash or a disk leave it; and half of it in the metrics file."""
    log, whole, others, rejected = b"", list[dict[str, Any]](), list[dict[str, Any]](), 0
    for seq, kind in enumerate(kinds):
        words = random.choice(["a\nb", "\ud800", f"{TAG} x=1"])
        text = line(seq, val_loss=random.random(), text=words)
        if kind == "whole":
            whole.append(read(text)[0][0])
            log += text[: random.choice((-1, len(text)))]  # the next one may follow on its line
        elif kind == "foreign":
            others.append({"epoch": seq, "val_loss": 0.5})
            log += f"{TAG} epoch={seq} val_loss=0.5\r\n".encode()
        elif isinstance(kind, bytes):
            log += kind
        else:
            end = random.randrange(len(TAG), len(text) - 2) if kind == "torn" else len(TAG)
            log += text[:end]
            rejected += 1
    for data in (log + b"\n", b"3: " + log.replace(b"\n", b"\n3: ") + b"\n"):
        found, rejects = read(data)
        assert [f for f in found if "v" in f] == whole and len(rejects) == rejected
        assert [f for f in found if "v" not in f] == others
    file = b"".join(encode(r).encode() + b"\n" + b'{"v":1,"kind":"ep\n' for r in whole)
    assert [f for f in read_file(io.BytesIO(file)) if isinstance(f, dict)] == whole


def test_a_record_with_a_byte_missing_or_changed_is_rejected() -> None:
    whole = line(0, epoch=3, val_loss=1.25, text="a b")[:-1]
    for at in range(len(TAG) + 1, len(whole)):
        for other in (b"", b"7", b"x", b'"', b"\xff"):
            broken = whole[:at] + other + whole[at + 1 :]
            if broken != whole:
                found, rejected = read(broken + b"\n")
                assert (found, len(rejected)) == ([], 1), broken


def test_a_record_without_its_identity_is_rejected() -> None:
    for other in [{"attempt": "0"}, {"seq": True}, {"v": None}]:
        content = {k: v for k, v in {**record(0), **other}.items() if v is not None}
        for data, reader_ in ((f"{TAG} {encode(content)}\n", scan), (encode(content), read_file)):
            (found,) = reader_(io.BytesIO(data.encode()))
            assert found == "a common field is missing"


def test_of_a_repeated_record_the_first_one_counts(tmp_path: Path) -> None:
    one, two = record(0, val_loss=1.0), record(0, val_loss=2.0)
    late = record(1, attempt=1)
    assert reader.unique([late, one, two, one, record(1)]) == [one, record(1), late]
    paths = RunPaths(tmp_path)
    paths.metrics_folder.mkdir()
    paths.metrics(0).write_text(encode(record(0, epoch=1, val_loss=1.0)))
    paths.log.write_bytes(line(0, epoch=1, val_loss=9.0) + line(2, epoch=2, val_loss=0.5))
    found = read_run(paths, "r")
    assert [e["val_loss"] for e in found.epochs] == [1.0, 0.5]  # the file's, not the log's
    assert found.lost == 1
    # With a checksum it wins over a line without.
    paths = RunPaths(tmp_path / "foreign")
    paths.folder.mkdir()
    foreign = b"[METRIC] epoch=1 val_loss=0.001\n[METRIC] epoch=7 val_loss=0.1\n"
    paths.log.write_bytes(line(0, epoch=0, val_loss=1.0) + line(1, epoch=1, val_loss=0.5) + foreign)
    epochs = read_run(paths, "r").epochs
    assert [(e["epoch"], e["val_loss"]) for e in epochs] == [(0, 1.0), (1, 0.5)]
    paths.log.write_text("[METRIC] epoch=0 a=1\n[METRIC] epoch=0 b=2\nend\n")
    assert read_run(paths, None).epochs == [{"epoch": 0, "a": 1, "b": 2}]


def memory_of(read_all: Any) -> tuple[list[Any], int]:
    tracemalloc.start()
    found = list(read_all())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found, peak


def test_bars_on_one_line_and_bare_tags_cost_little_memory_and_hide_no_record(tmp_path) -> None:
    """Pieces of such a line are read alone: a record stands around the end of each."""
    paths, bars = RunPaths(tmp_path), b"\r 10%|x=1 [METRIC" * (1 << 18)
    for at in (-30, 0, 20):
        start = line(0)[:60] + bars
        stream = io.BytesIO(start[: (2 << 20) + at] + line(1)[:-1] + bars + b"\n" + line(2))
        (_, *found), peak = memory_of(lambda s=stream: scan(s))
        assert found == [record(1), record(2)] and peak < 8 << 20
    paths.log.write_bytes(b"[METRIC]\n" * 10_000 + b"[METRIC]" * 10_000)
    ((problem,), peak) = memory_of(lambda: read_run(paths, None).problems)
    assert "20000 [METRIC] lines rejected, the first: nothing behind the tag" in problem
    assert peak < 2 << 20


# Lines of other programs.


def test_a_whole_line_of_another_program_is_read() -> None:
    for text, expected in [
        ("epoch=3.0, val_loss=.5; lr=1e-3", {"epoch": 3, "val_loss": 0.5, "lr": 0.001}),
        ("epoch=3 loss=nan x=-inf", {"epoch": 3, "loss": None, "x": None}),
        ("epoch=3 size=12GB at=12:30:01", {"epoch": 3, "size": "12GB", "at": "12:30:01"}),
        ("epoch=\x1b[32m3\x1b[0m a=2\x1b[0m", {"epoch": 3, "a": 2}),
        ("epoch=1 n=12345678901234567890", {"epoch": 1, "n": 12345678901234567890.0}),
    ]:
        for log in (f"7: [METRIC] {text}\n", f"\x1b[1m[METRIC]\x1b[0m {text}\r\nnext\n"):
            assert read(log) == ([expected], [])


def test_a_line_that_may_be_cut_or_mixed_is_rejected() -> None:
    for text, reason in [
        ("nothing here", "no key=value"),
        ('epoch=3 name="two', "not key=value alone"),
        ("epoch=3 x=225\x1b[A50", "not key=value alone"),
        ("epoch=3 val_loss=1.", "lost its end"),
        ("epoch=3 val_loss=1e", "lost its end"),
        ("epoch=3 images_per_s=225epoch=4", "lost its end"),
        ("epoch=3 images_per_s=225[rank1]:x", "lost its end"),
        ("epoch=3 loss=1 epoch=4", "a name twice"),
        ("epoch=3 images_per_s=225\r 10%|#   | 1/10", "truncated at the end"),
        ("epoch=-1 x=123", "epoch '-1' is no whole number"),
        ("epoch=3 v=1", "v is the version of jobkit's own records"),
        ('{"epoch": 3, "x": 22', "JSON without its checksum"),
        ('{"epoch":3,"text":"a b=1 "}', "of another program, which prints key=value"),
    ]:
        found, (rejected,) = read(f"[METRIC] {text}\n".encode("latin-1"))
        assert found == [] and reason in rejected


def test_two_lines_of_another_program_on_one() -> None:
    found, rejected = read("[METRIC] epoch=1 a=2 [METRIC] epoch=2 a=3\n")
    assert (found, rejected) == ([{"epoch": 1, "a": 2}, {"epoch": 2, "a": 3}], [])
    found, (first,) = read("[METRIC] epoch=1 a=2[METRIC] epoch=2 a=3\n")  # a may have been 25
    assert (found, first) == ([{"epoch": 2, "a": 3}], "truncated at the end")
    for end in (b"epoch=3 a=2", b"epoch=3 val_lo"):  # the end of a log, and of a file
        assert [type(f) for f in read_file(io.BytesIO(end))] == [str]
        assert read(b"[METRIC] " + end + line(0))[0] == [record(0)]
