"""The [METRIC] line: record kinds, fields, units, the writer and the tolerant reader.

A record is `[METRIC] ` and one JSON object on one line of at most 1,000 bytes. Its last field, crc,
is the CRC-32 of the object before it was added, so that a line from which bytes are missing is
never taken for a measurement. Other programs may print `[METRIC] key=value key=value` instead.
"""

import json
import math
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

SCHEMA_VERSION = 1
TAG = "[METRIC]"
MAX_LINE_BYTES = 1000  # srun tears longer lines

# Every record has these: seq counts from 0 in each attempt, t is Unix time in seconds.
COMMON = ("v", "kind", "study", "run_id", "attempt", "rank", "seq", "t")

KINDS: dict[str, dict[str, str]] = {
    "run_start": {
        "spec": "settings that differ from the defaults",
        "world_size": "ranks",
        "nodes": "nodes",
        "node_list": "host names in rank order, one text",
        "device": "name of the device",
        "device_type": "cuda or cpu",
        "backend": "nccl or gloo",
        "versions": "python, torch, cuda, nccl",
        "git_commit": "commit of the code",
        "job_id": "the scheduler's id of the job, if any",
        "global_batch_size": "samples in one optimizer step",
        "batch_size_per_rank": "samples in one optimizer step on the fullest rank",
        "train_samples": "training samples",
        "test_samples": "test samples",
        "parameters": "parameters of the model",
        "threads": "CPU threads of a rank",
    },
    "startup": {
        "import_s": "import of torch",
        "group_s": "process group",
        "data_s": "data",
        "model_s": "model and wrap",
        "compile_s": "torch.compile, in the first iteration; null without",
        "total_s": "from the start of the process to the first iteration",
    },
    "epoch": {
        "epoch": "which, from 0",
        "iterations": "optimizer steps",
        "train_loss": "mean over every sample seen",
        "val_loss": "mean over every test sample",
        "val_accuracy": "share of the test samples, 0 to 1",
        "epoch_time_s": "wall time of the timed iterations, slowest rank",
        "timed_images": "images in epoch_time_s (less than the epoch's by the warm-up)",
        "images_per_s": "timed_images / epoch_time_s",
        "eval_time_s": "wall time of the evaluation, slowest rank",
        "data_wait_s": "of epoch_time_s: waiting for batches, slowest rank",
        "peak_memory_mib": "peak of allocated device memory (CPU: resident set), fullest rank",
        "reserved_memory_mib": "peak of memory reserved on the device; null on the CPU",
        "lr": "learning rate of the last step",
    },
    "breakdown": {
        "compute_s": "an iteration",
        "exposed_communication_s": "an iteration",
        "data_wait_s": "an iteration",
        "other_s": "an iteration",
    },
    "checkpoint": {
        "action": "saved, loaded, rejected",
        "iteration": "which",
        "bytes": "size",
        "time_s": "duration",
    },
    "message": {"level": "info, warning, error", "text": "what the report must show"},
    "run_end": {
        "status": "ok, failed, preempted",
        "reason": "why, when not ok",
        "total_time_s": "from the start of the process",
        "val_loss": "final",
        "val_accuracy": "final",
    },
}

_LOOK_AHEAD = 1 << 16  # bytes after a tag in which its record must end
_BLOCK = 1 << 20
_TAG = TAG.encode()
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEAD = re.compile(r"(?:[ \t]|\x1b\[[0-9;?]*[A-Za-z])*")
_PAIR = re.compile(r'([A-Za-z_][A-Za-z0-9_.]*)=("[^"]*"|[^\s"]+)')
_CRC = re.compile(r',"crc":"([0-9a-f]{8})"\}$')
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)

Record = dict[str, Any]


@dataclass(frozen=True)
class Rejected:
    """A place that carries the tag and no whole record: where, how long, and why."""

    offset: int
    length: int
    reason: str


# --- writing ---------------------------------------------------------------------------------


def _finite(value: Any) -> Any:
    """The value with every NaN and infinity as None, which JSON writes as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def encode(record: Record) -> str:
    """The record as one JSON object with its checksum; no newline and never the tag inside."""
    text = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
    text = text.replace(TAG, "[METRIC\\u005d")
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}'


def _line_bytes(record: Record) -> int:
    return len(TAG) + 1 + len(encode(record)) + 1


def _pieces(value: Any, room: int) -> list[Any]:
    """Split one field's value into pieces that encode to at most room bytes each."""
    if isinstance(value, dict):
        pieces: list[Any] = [{}]
        for key, inner in value.items():
            for part in _pieces(inner, room - len(json.dumps(key)) - 8):
                if len(json.dumps({**pieces[-1], key: part})) > room:
                    pieces.append({})
                pieces[-1][key] = part
        return pieces
    if isinstance(value, str) and len(json.dumps(value)) > room:
        kept = value
        while len(json.dumps(kept)) > room - 12:
            kept = kept[: int(len(kept) * 0.9)]
        return [f"{kept} [cut]"]
    return [value]


def split(head: Record, fields: Record) -> list[Record]:
    """Spread fields over as many records as keep each line within MAX_LINE_BYTES.

    More than one record carry part and parts; merge_parts makes them one again. A text that fits
    in no line is cut, and says so.
    """
    room = MAX_LINE_BYTES - _line_bytes({**head, "part": 100, "parts": 100}) - 24
    bodies: list[Record] = [{}]
    for key, value in fields.items():
        for piece in _pieces(_finite(value), room - len(key) - 8):
            if key in bodies[-1] or len(json.dumps({**bodies[-1], key: piece})) > room:
                bodies.append({})
            bodies[-1][key] = piece
    if len(bodies) == 1:
        return [{**head, **bodies[0]}]
    parts = {"parts": len(bodies)}
    return [{**head, "part": i, **parts, **body} for i, body in enumerate(bodies)]


class MetricWriter:
    """Writes the records of one attempt: to its file (the truth) and to the log (the mirror)."""

    def __init__(
        self, *, study: str, run_id: str, attempt: int, rank: int, path: Path, log: TextIO
    ) -> None:
        self._common = {"study": study, "run_id": run_id, "attempt": attempt, "rank": rank}
        self._log = log
        self._seq = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and O_APPEND: one write a record, so that a kill cannot tear one.
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record of a kind in KINDS (several lines where one would be too long)."""
        assert kind in KINDS, kind
        assert fields.keys() <= KINDS[kind].keys(), fields.keys() - KINDS[kind].keys()
        head = {"v": SCHEMA_VERSION, "kind": kind, **self._common, "seq": 10**6, "t": time.time()}
        for record in split(head, fields):
            record["seq"] = self._seq
            self._seq += 1
            text = encode(record)
            self._file.write(text.encode() + b"\n")
            self._log.write(f"{TAG} {text}\n")
            self._log.flush()

    def close(self) -> None:
        """Close the attempt's file."""
        self._file.close()


# --- reading ---------------------------------------------------------------------------------


def _checked(text: str) -> Record | str:
    """Decode one JSON object that is a record; return the reason where it is not."""
    record = _DECODER.decode(text)
    if "v" not in record and "crc" not in record:
        return record if record else "empty object"
    crc = _CRC.search(text)
    if not crc or zlib.crc32((text[: crc.start()] + "}").encode()) != int(crc[1], 16):
        return "checksum does not fit"
    del record["crc"]
    whole = (
        isinstance(record.get("kind"), str)
        and isinstance(record.get("run_id"), str)
        and type(record.get("attempt")) is int
        and type(record.get("seq")) is int
    )
    return record if whole else "a common field is missing"


def _number(word: str) -> Any:
    """A word of a key=value line as a number where it is one; NaN and infinity are None."""
    for make in (int, float):
        try:
            value = make(word)
        except ValueError:
            continue
        return value if math.isfinite(value) else None
    return word[1:-1] if word[:1] == '"' else word


def _pairs(text: str, complete: bool) -> Record | str:
    """Read a foreign `key=value key=value` line."""
    if not complete:
        return "torn at the end"
    line = _ANSI.sub("", text.split("\r")[0])
    pairs = {key: _number(value) for key, value in _PAIR.findall(line)}
    return pairs or "no JSON object and no key=value"


def _decode_at(segment: bytes, complete: bool) -> tuple[Record | str, int]:
    """Read the record that follows a tag; return it (or why not) and the bytes it took."""
    text = segment.decode("utf-8", "replace")
    start = _LEAD.match(text).end()  # type: ignore[union-attr]
    if not text.startswith("{", start):
        own, tag, _ = segment.partition(_TAG)  # another record may follow on the line
        complete = own[-1:].isspace() if tag else complete
        return _pairs(own.decode("utf-8", "replace"), complete), len(own)
    for attempt in dict.fromkeys((text[start:], _ANSI.sub("", text[start:]))):
        try:
            _, end = _DECODER.raw_decode(attempt)
        except (ValueError, RecursionError):
            continue
        if "�" in attempt[:end]:
            return "bytes that are not UTF-8", 0
        result = _checked(attempt[:end])
        whole = attempt == text[start:] and not isinstance(result, str)
        return result, len(text[: start + end].encode()) if whole else 0
    return "torn or not JSON", 0


def scan(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield every record in a log, and every tagged place that holds none, in order.

    Memory does not grow with the log: a record ends within 64 KiB of its tag or is rejected.
    """
    buffer, offset = b"", 0
    while True:
        block = stream.read(_BLOCK)
        buffer += block
        position = 0
        while (tag := buffer.find(_TAG, position)) >= 0:
            body = tag + len(_TAG)
            newline = buffer.find(b"\n", body, body + _LOOK_AHEAD)
            if newline < 0 and block and len(buffer) - body < _LOOK_AHEAD:
                position = tag
                break  # the end of this line is not read yet
            end = newline if newline >= 0 else min(len(buffer), body + _LOOK_AHEAD)
            found, taken = _decode_at(buffer[body:end], complete=newline >= 0)
            position = body + taken
            if isinstance(found, str):
                following = buffer.find(_TAG, body, end)
                stop = end if following < 0 else following
                yield Rejected(offset + tag, stop - tag, found)
                position = stop
            else:
                yield found
        else:
            position = max(position, len(buffer) - len(_TAG) + 1)
        buffer, offset = buffer[position:], offset + position
        if not block:
            return


def read_file(stream: BinaryIO) -> Iterator[Record | Rejected]:
    """Yield the records of a metrics file: one JSON object a line, without the tag."""
    offset = 0
    for line in stream:
        if line.strip():
            found, _ = _decode_at(b" " + line.strip(), complete=line.endswith(b"\n"))
            yield Rejected(offset, len(line), found) if isinstance(found, str) else found
        offset += len(line)


def unique(records: Iterable[Record]) -> list[Record]:
    """Each record once, in the order of attempts and sequence numbers; foreign ones at the end."""
    own: dict[tuple[str, int, int], Record] = {}
    foreign = []
    for record in records:
        if "v" in record:
            own.setdefault((record["run_id"], record["attempt"], record["seq"]), record)
        else:
            foreign.append(record)
    return [own[key] for key in sorted(own)] + foreign


def merge_parts(records: Iterable[Record]) -> Record:
    """One record of those that split spread over several lines; nested objects are joined."""
    whole: Record = {}
    for record in records:
        for key, value in record.items():
            if isinstance(value, dict) and isinstance(whole.get(key), dict):
                whole[key] = {**whole[key], **value}
            else:
                whole.setdefault(key, value)
    whole.pop("part", None)
    whole.pop("parts", None)
    return whole
