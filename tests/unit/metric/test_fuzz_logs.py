"""A thousand mangled logs: nothing raises, no record is lost or made up, rejects are exact."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jobkit.analysis.collect.records import RunRecords, read_run
from jobkit.metric import reader
from jobkit.metric.kinds import TAG, encode
from jobkit.outcome.state import STATUSES, run_state
from jobkit.paths import RunPaths

SEEDS = range(200)  # five logs of each
RUN_ID = "ddp-n1-g2-b64-fp32-r0-0a1b2c"
MARK = TAG.encode()
PREFIXES = (b"", b"", b"3: ", b"12: ", b"[default0]:", b"[rank1]: ", b"\x1b[32m", b"50%|#  |\r")
PREFIXES += (b"2026-01-01 | ", b"\x00\x00", b"\xff\xfe ")
ENDS = (b"\n", b"\n", b"\r\n", b"\x1b[0m\n", b" (node7)\n", b"")
JUNK = (b"epoch 3: fine", b"\x00" * 40, b"\xc3\x28 caf\xe9", b"[MET", b"METRIC] epoch=9")
JUNK += (b"\x1b[1;31mred\x1b[0m", b'{"v":1,"kind":"epoch","epoch":9}', b"Traceback:", b"", b"\r\r")
TEXTS = ("fine", "epoch=7 val_loss=0.001", f"{TAG} epoch=8", '"}', '{"epoch":7}', "a\nb", "\x1b[m")
TEXTS += ("\u00e4\u4e16", "\ufffd", "\ud800", '","crc":"00000000"}', "$(rm -rf /)", "\x00")
EMPTY = (b"", b" epoch", b" {}", b" []", b" {", b' "v":1', b" =3")
# What stands before and at the place where an inner part of a record begins.
INNER = (b":{", b'"e', b" e", b',"', b"\\n", b"1,", b"u0")
KINDS = ["whole"] * 6 + ["damaged"] * 3 + ["torn", "foreign", "junk", "inner"] * 2
KINDS += ["spliced", "empty", "requeue", "nameless", "foreign_torn"]


def line(content: dict[str, Any]) -> bytes:
    return f"{TAG} {encode(content)}".encode()


@dataclass
class Log:
    """A log as it comes from a cluster, and what a reader must find in it, no more and no less."""

    random: Random
    data: bytes = b""
    own: list[dict[str, Any]] = field(default_factory=list)  # each once, in order
    others: list[dict[str, Any]] = field(default_factory=list)  # of programs without a checksum
    rejected: int = 0
    attempt: int = 0
    seq: int = 0

    def record(self) -> dict[str, Any]:
        """The next record of the attempt, as a reader has to give it back."""
        head = {"v": 1, "kind": "epoch", "study": "s", "run_id": RUN_ID, "attempt": self.attempt}
        head |= {"rank": 0, "seq": self.seq, "t": 1.5}
        self.seq += 1
        if self.random.random() < 0.3:
            return {**head, "kind": "message", "level": "info", "text": self.random.choice(TEXTS)}
        lr = self.random.choice((None, 1e-300))
        spec = {"spec": {"epoch": 5, "lr": 0.1}} if self.random.random() < 0.2 else {}
        return {**head, "epoch": self.seq, "val_loss": self.random.random(), "lr": lr, **spec}

    def reject(self, text: bytes) -> None:
        self.rejected += text.count(MARK)
        self.data += text

    def add(self, kind: str) -> None:
        """One more piece, damaged as srun, tee, torchrun, a crash or a disk do it."""
        pick = self.random.choice
        prefix = pick(PREFIXES)
        if kind == "requeue":
            self.attempt, self.seq = self.attempt + 1, 0
            self.data += b"\n[jobkit] start\n"
        elif kind == "junk":
            self.data += b"\n" + pick(JUNK) + b"\n"
        elif kind == "empty":  # nothing behind the tag that could be a record
            self.reject(MARK + pick(EMPTY) + b"\n")
        elif kind == "foreign":
            content = {"epoch": len(self.others), "val_loss": self.random.random(), "tag": "x"}
            pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in content.items())
            self.others.append(content)
            text = pick((json.dumps(content), pairs)).encode()
            self.data += prefix + MARK + b" " + text + pick((b"\n", b"\r\n", b"\x1b[0m\n"))
        else:
            self.add_own(kind, self.record(), prefix)

    def add_own(self, kind: str, content: dict[str, Any], prefix: bytes) -> None:
        pick, text = self.random.choice, line(content)
        at = self.random.randrange(len(MARK), len(text) - 1)
        if kind == "whole":
            self.own.append(content)
            self.data += prefix + text + pick(ENDS)
        elif kind == "torn":  # the next one may follow on its line
            self.reject(text[: self.random.randrange(1, len(text))] + pick((b"\n", b"", b"\0\n")))
        elif kind == "damaged":  # bytes are missing, or others are in their place
            other = pick((b"", b"7", b"\xff", b"\x00", b'"', b"\n", b"\x1b[0m", b"3: "))
            broken = text[:at] + other + text[at + pick((1, 1, 3, 40, 200)) :]
            if broken.endswith(text[len(MARK) + 1 :]):  # what changed lies before the record
                broken = text[:at]
            self.reject(broken + b"\n")
        elif kind == "inner":  # looks like a record or like pairs
            starts = [i for i in range(len(MARK) + 2, len(text)) if text[i - 1 : i + 1] in INNER]
            self.reject(MARK + pick((b"", b" ")) + text[pick(starts) :] + b"\n")
        elif kind == "nameless":  # without its version and its checksum it is JSON still
            self.reject(text.replace(b'"v":1,', b"")[:-18] + b"}\n")
        elif kind == "spliced":  # one rank's line inside another's: the inner one is whole
            inner = self.record()
            self.own.append(inner)
            self.reject(text[:at])
            self.data += prefix + line(inner) + pick((b"\n", b"")) + text[at:] + b"\n"
        else:  # a line of another program, cut within a word, where a record begins
            self.own.append(content)
            foreign = b" epoch=99 val_loss=0.123456789"
            self.reject(MARK + foreign[: self.random.randrange(2, len(foreign))].rstrip())
            self.data += text + b"\n"


def read(paths: RunPaths, data: bytes) -> RunRecords:
    paths.log.write_bytes(data)
    assert run_state(paths).status in STATUSES
    return read_run(paths, RUN_ID)


def split(found: RunRecords) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, int]]:
    """Own records, those of others, and the rejects of each file."""
    own, others = ([r for r in found.records if ("v" in r) is of_run] for of_run in (True, False))
    return own, others, {Path(r.file).name: r.count for r in found.rejects}


@pytest.mark.parametrize("part", range(4))
def test_a_mangled_log_gives_what_is_whole_in_it(tmp_path, monkeypatch, part) -> None:
    for seed in SEEDS[part::4]:
        log = Log(Random(seed))
        for kind in log.random.choices(KINDS, k=seed % 13):
            log.add(kind)
        log.data += b"\n"
        paths = RunPaths(tmp_path / str(seed) / RUN_ID)
        paths.folder.mkdir(parents=True)
        check(log, paths, monkeypatch)


def check(log: Log, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    rejects = {"train.log": log.rejected} if log.rejected else {}
    whole = read(paths, log.data)
    assert split(whole) == (log.own, log.others, rejects)
    last = {r["attempt"]: r["seq"] for r in log.own}
    assert whole.lost == sum(last.values()) + len(last) - len(log.own)
    # All of it once more, as two tees into one file leave it.
    twice = {name: 2 * count for name, count in rejects.items()}
    assert split(read(paths, log.data * 2)) == (log.own, log.others * 2, twice)
    # A prefix before every line, as of srun -l or torchrun; and long lines in pieces.
    label = log.random.choice((b"0: ", b"[default1]:", b"2026 | \x1b[32m"))
    labelled = label + log.data[:-1].replace(b"\n", b"\n" + label) + b"\n"
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_MAX_LINE", log.random.randrange(600, 2000))
        assert split(read(paths, labelled)) == (log.own, log.others, rejects)
    # A log that is still being written.
    written = log.data[: log.random.randrange(len(log.data) + 1)]
    own, others, _ = split(read(paths, written))
    assert own == [r for r in log.own if line(r) in written]
    assert all(r in log.others for r in others)
    # Half of the records are in the metrics file, after a full disk behind a torn one each.
    torn = log.random.choice((b"", b'{"v":1,"kind":"ep', b"\x00" * 99))
    paths.metrics_folder.mkdir()
    kept = [torn + encode(r).encode() + b"\n" for r in log.own[::2]]
    paths.metrics(0).write_bytes(b"".join(kept))
    of_file = {"0.jsonl": len(kept)} if torn and kept else {}
    assert split(read(paths, log.data)) == (log.own, log.others, {**of_file, **rejects})
