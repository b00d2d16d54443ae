"""Lines without a checksum: what is taken of them, and what is counted as rejected."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobkit.analysis.collect.records import read_run
from jobkit.metric.line import encode
from jobkit.metric.reader import Rejected, merge_parts, read_file, scan
from jobkit.paths import RunPaths


def found(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a log, and the reasons of those that were rejected."""
    items = list(scan(io.BytesIO(text.encode())))
    records = [i for i in items if isinstance(i, dict)]
    return records, [i.reason for i in items if isinstance(i, Rejected)]


@pytest.mark.parametrize(
    "text",
    [
        "[METRIC] epoch=3 images_per_s=225\n=== requeue 1\n",
        "[METRIC] epoch=3 images_per_s=225\n\n[jobkit] start: attempt 1 of x\n",
        "[METRIC] epoch=3 images_per_s=225 srun: requeued\n",
        "[METRIC] epoch=3 images_per_s=225\nsrun: Job step aborted\n",
        "[METRIC] epoch=3 images_per_s=225\nslurmstepd: error: *** JOB 1\n",
        "[METRIC] epoch=3 images_per_s=225[jobkit] start: attempt 1\n",
        "[METRIC] epoch=3 val_loss=1.27 images\n",
        "[METRIC] epoch=3 val_loss=1.\n25\n",
        "[METRIC] epoch=3 val_loss=1\n25\n",
        "[METRIC] epoch=3 val_loss=1.\n",
        "[METRIC] epoch=3 val_loss=1e\n",
        "[METRIC] epoch=3 val_loss=1. loss=9 epoch=7\n",
        "[METRIC] epoch=3 val_loss=1.2",
        "[METRIC] epoch=3 images_per_s=225\nTraceback (most recent call last):\n",
        "[METRIC] epoch=3 images_per_s=225\n\nRuntimeError: NCCL error\n",
        "[METRIC] epoch=3 images_per_s=225\nKilled\n",
        "[METRIC] epoch=3 images_per_s=225\nterminate called without an active exception\n",
        "[METRIC] epoch=3 images_per_s=225\n/var/spool/job7/slurm_script: line 9: 12 Killed\n",
        "0: [METRIC] epoch=3 images_per_s=225\n0: slurmstepd: error: *** STEP\n",
        "[METRIC] epoch=3 images_per_s=225\n[rank1]: Traceback (most recent call last):\n",
        "[METRIC] epoch=3 images_per_s=225\n[1,0]<stderr>: Traceback (most recent)\n",
        "[METRIC] epoch=3 images_per_s=225\n2026-11-22T10:00:00.123456Z slurmstepd: error\n",
        "[METRIC] epoch=3 images_per_s=225\n\x1b[31mslurmstepd: error\n",
        "[METRIC] epoch=3 images_per_s=225\n\x00\x00\x00[jobkit] start: attempt 1\n",
        "[METRIC] epoch=3 images_per_s=225\r\n\r\n[jobkit] start: attempt 1\n",
        "[METRIC] epoch=3 images_per_s=225\x00\x00\x00\n",
        "[METRIC] epoch=3 images_per_s=225\n1.3 val_loss=0.5\n",
        "[METRIC] epoch=3 images_per_s=225\r 10%|#   | 1/10\n1.3\n",
        "[METRIC] epoch=3 images_per_s=225\x1b[A50\n",
        '[METRIC] {"epoch": 3, "images_per_s": 225\x1b[K50}\n',
        "[METRIC] epoch=3 images_per_s=225\x1b[3\n",
        "[METRIC] epoch=3 images_per_s=225Killed\n",
        "[METRIC] epoch=3 images_per_s=225WARNING:root:x\n",
        "[METRIC] epoch=3 images_per_s=225epoch=4\n",
        "[METRIC] epoch=3 images_per_s=225[rank1]:x\n",
        '[METRIC] {"epoch": 3, "a": 22, "epoch": 4, "a": 225}\n',
        "[METRIC] epoch=-1 images_per_s=123\n",
        "[METRIC] epoch=2.5 images_per_s=123\n",
        '[METRIC] {"epoch": -1, "val_loss": 2}\n',
        '[METRIC] {"epoch": "three", "val_loss": 2}\n',
        '[METRIC] {"epoch": null, "val_loss": 2}\n',
    ],
)
def test_what_may_be_cut_or_is_no_epoch_is_counted_and_not_taken(text: str) -> None:
    records, reasons = found(text)
    assert records == []
    assert len(reasons) == 1 and reasons[0]


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("[METRIC] epoch=3, val_loss=1.25;\n", {"epoch": 3, "val_loss": 1.25}),
        ("[METRIC] epoch=3.0 val_loss=.5\n", {"epoch": 3, "val_loss": 0.5}),
        ('[METRIC] {"epoch": "3"}\n', {"epoch": 3}),
        ('[METRIC] {"epoch": 3.0, "a": 1}\n', {"epoch": 3, "a": 1}),
        ("[METRIC] epoch=3 val_loss=1.25\nnext line\n", {"epoch": 3, "val_loss": 1.25}),
        ("[METRIC] epoch=3 val_loss=1.25\n2026-11-22 x\n", {"epoch": 3, "val_loss": 1.25}),
        ("[METRIC] epoch=3 val_loss=1.25\r\nnext line\r\n", {"epoch": 3, "val_loss": 1.25}),
        ("[METRIC] epoch=3 val_loss=1.25\n0: epoch 4\n", {"epoch": 3, "val_loss": 1.25}),
        ("[METRIC] epoch=3 val_loss=1.25\n12 images left\n", {"epoch": 3, "val_loss": 1.25}),
        (
            "[METRIC] epoch=3 size=12GB at=12:30:01\n",
            {"epoch": 3, "size": "12GB", "at": "12:30:01"},
        ),
        ("\x1b[1m[METRIC] epoch=\x1b[32m3\x1b[0m a=2\x1b[0m\n", {"epoch": 3, "a": 2}),
        ('[METRIC] epoch=3 tag="a b"\n=== requeue\n', {"epoch": 3, "tag": "a b"}),
        ("[METRIC] epoch=3 tflops=312TFLOPS\n", {"epoch": 3, "tflops": "312TFLOPS"}),
        ("[METRIC] epoch=3 bw=25Gbps id=3ABCDE\n", {"epoch": 3, "bw": "25Gbps", "id": "3ABCDE"}),
    ],
)
def test_what_is_whole_is_taken(text: str, record: dict[str, Any]) -> None:
    assert found(text) == ([record], [])


@pytest.mark.parametrize(
    "following",
    [
        "Epoch: 3", "Loss: 0.123", "Accuracy: 0.93", "Elapsed: 10", "epoch: 3 loss=0.2",
        "Error: 0.5", "Error rate 0.5", "val.Error 3", "TestError: 0.05", "*** epoch 3",
        "-----", "...", "0.5 s", "3: 0.5", "Terminated early at epoch 3", "[INFO]: 5", "step: 5",
        "Killed 3 of 5 workers", "malloc statistics: 5", "epoch| 3", "corrupted images: 3",
    ],
)  # fmt: skip
def test_what_programs_print_between_their_lines_cuts_none(following: str) -> None:
    lines = [f"[METRIC] epoch={n} images_per_s=500.5\n{following}\n" for n in range(20)]
    records, reasons = found("".join(lines))
    assert (len(records), reasons) == (20, [])


def test_an_object_with_a_name_twice_says_so() -> None:
    assert found('[METRIC] {"epoch": 1, "a": 1, "a": 2}\n')[1] == ["a name twice: two lines in one"]


# What another process may write in the middle of a line, and what never looks like a number.
OTHERS = [b"Traceback (most recent call last):\n", b"[rank1]: error\n", b"[METRIC] epoch=9 x=1\n"]
OTHERS += [b"\r 10%|#", b"\x1b[31mred\x1b[0m\n", b"\x00\x00\x00", b"epoch=7 ", b'{"a": 1}\n']
OTHERS += [b"Killed\n", b"\nslurmstepd: error: *** STEP 1.0 CANCELLED\n", b"\n[jobkit] start: x\n"]


@settings(max_examples=150, deadline=None)
@given(
    value=st.floats(100, 1e6).map(lambda x: round(x, 3)),
    at=st.integers(0, 10**6),
    other=st.sampled_from(OTHERS),
    rest=st.booleans(),
)
def test_a_number_that_others_write_into_is_never_taken_shorter(
    value: float, at: int, other: bytes, rest: bool
) -> None:
    """Cut anywhere in its digits, with another's output there, and its rest behind that or lost."""
    head, digits = b"[METRIC] epoch=3 images_per_s=", str(value).encode()
    cut = 1 + at % (len(digits) - 1)
    end = digits[cut:] + b"\n" if rest else b""
    log = head + digits[:cut] + other + end
    taken = [i for i in scan(io.BytesIO(log)) if isinstance(i, dict)]
    assert [r["images_per_s"] for r in taken if "images_per_s" in r] in ([], [value])


@pytest.mark.parametrize("block", [1, 2, 7, 30, 64, 1000])
def test_what_follows_a_line_counts_whatever_the_size_of_a_block(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("jobkit.metric.reader._BLOCK", block)
    text = "[METRIC] epoch=1 x=5\nfine\n[METRIC] epoch=2 x=225\n=== requeue 1\n"
    records, reasons = found(text)
    assert records == [{"epoch": 1, "x": 5}]
    assert len(reasons) == 1


def test_the_last_line_of_a_metrics_file_may_be_cut_too() -> None:
    items = list(read_file(io.BytesIO(b"epoch=1 x=5\nepoch=2 x=22")))
    assert [type(i) for i in items] == [dict, Rejected]


def own(seq: int, **fields: Any) -> str:
    head = {"v": 1, "kind": "epoch", "study": "s", "run_id": "run", "attempt": 0, "rank": 0}
    return f"[METRIC] {encode({**head, 'seq': seq, 't': 1.0, **fields})}\n"


def test_a_record_with_a_checksum_wins_and_the_other_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [own(0, epoch=0, val_loss=1.0), own(1, epoch=1, val_loss=0.5)]
    lines += ["[METRIC] epoch=1 val_loss=0.001\n", "[METRIC] epoch=7 val_loss=0.1\n"]
    (folder / "train.log").write_text("".join(lines))
    records = read_run(RunPaths(folder), "run")
    assert [(e["epoch"], e["val_loss"]) for e in records.epochs] == [(0, 1.0), (1, 0.5)]
    assert records.epochs_not_taken == 2


def test_a_script_without_checksums_keeps_its_epochs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.log").write_text("[METRIC] epoch=0 a=1\n[METRIC] epoch=0 b=2\nend\n")
    records = read_run(RunPaths(folder), None)
    assert records.epochs == [{"epoch": 0, "a": 1, "b": 2}]
    assert records.epochs_not_taken == 0


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_log_in_utf_16_is_told(tmp_path: Path, codec: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.log").write_bytes("[METRIC] epoch=0 a=1\n".encode(codec))
    (reject,) = read_run(RunPaths(folder), None).rejects
    assert "UTF-16" in reject.reason and "iconv" in reject.reason


@pytest.mark.parametrize("block", [7, 64, 1 << 18])
@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-16-be", "UTF-16"),
        ("utf-32-le", "UTF-16"),
        ("colours", "escape sequence"),
    ],
)
def test_a_tag_in_another_form_is_counted_once(
    middle: str, reason: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a log, between whole lines, with and without checksums."""
    monkeypatch.setattr("jobkit.metric.reader._BLOCK", block)
    line = "[METRIC] epoch=1 a=2\r\n"
    if middle == "colours":
        other = line.replace("METRIC", "\x1b[1mMETRIC\x1b[0m").encode()
    else:
        other = line.encode(middle)
    text = own(0, epoch=0).encode() + other + b"METRIC\n" + other + own(1, epoch=2).encode()
    items = list(scan(io.BytesIO(text)))
    assert [i["epoch"] for i in items if isinstance(i, dict)] == [0, 2]
    rejected = [i for i in items if isinstance(i, Rejected)]
    assert len(rejected) == 2 and all(reason in i.reason for i in rejected)
    for one in rejected:
        assert text[one.offset : one.offset + one.length].replace(b"\0", b"")[:1] == b"["


def test_lines_after_a_beginning_in_utf_16_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    head = ("text of a console\r\n" * 3).encode("utf-16")
    (folder / "train.log").write_bytes(head + own(0, epoch=0).encode())
    records = read_run(RunPaths(folder), "run")
    assert [e["epoch"] for e in records.epochs] == [0]
    assert records.rejects[0].count == 1 and "UTF-16" in records.rejects[0].reason


def test_a_record_that_lost_a_part_says_so() -> None:
    parts = [{"kind": "run_start", "part": 0, "parts": 2, "spec": {"epochs": 3}}]
    assert merge_parts(parts)["incomplete"] is True
    both = [*parts, {"kind": "run_start", "part": 1, "parts": 2, "spec": {"model": "mlp"}}]
    assert "incomplete" not in merge_parts(both)
    assert merge_parts(both)["spec"] == {"epochs": 3, "model": "mlp"}
