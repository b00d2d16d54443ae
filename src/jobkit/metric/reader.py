"""The tolerant reader of [METRIC] lines: every complete record of a log, and the rejected rest.

    for found in scan(stream):        a log, with the tag anywhere in its lines
    for found in read_file(stream):   a metrics file: one record a line, without the tag

Both yield records, or the reason why a line is none, in memory that does not grow with the file.
A record of ours ends with its CRC-32: a torn or mixed line is rejected, never read as a
measurement. Another program's line is key=value pairs and nothing else.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from jobkit.metric.kinds import Record
from jobkit.metric.pattern import read_value
from jobkit.program.lines import TAG

_TAG = TAG.encode()
_MAX_LINE = 1 << 20  # bytes of a log's line that are looked at together
_MAX_RECORD = 16 << 20  # bytes of a record in a file: a profile of many kernels has a few million
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_PAIR = re.compile(r'(?<!\S)([A-Za-z_][A-Za-z0-9_.]*)=("[^"]*"|[^\s"\x00-\x1f\x7f]+)[,;]?')
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_CUT_NUMBER = re.compile(r"[+-]?[0-9]*\.|[+-]?[0-9.]+[eE][+-]?")
# A number that lost its end to another pair or to a rank's label. Letters alone may be its unit.
_RUNS_ON = re.compile(r"[+-]?[0-9][0-9.]*(?:\[|[A-Za-z_][\w.]*=)")
_IDENTITY = {"kind": str, "run_id": str, "attempt": int, "seq": int}
Loads = Callable[[bytes], Any]


def scan(
    stream: BinaryIO, *, loads: Loads = json.loads, start: re.Pattern[bytes] | None = None
) -> Iterator[Record | str]:
    """Yield every record in a log, and for every tagged place without one the reason, in order.

    loads: decodes one JSON object of our writer. start: finds the line at the start of an attempt,
    and in its first group the number: another program's records get it.
    """
    attempt: int | None = None
    for line in _lines(stream):
        before, *parts = line.split(_TAG)
        if start and (mark := start.search(before)):
            attempt = int(mark[1])
        for part in parts:
            record = _read(part, loads) if part.strip() else "nothing behind the tag"
            if isinstance(record, dict) and "v" not in record and attempt is not None:
                record = {**record, "attempt": attempt}
            yield record


def read_file(stream: BinaryIO, *, loads: Loads = json.loads) -> Iterator[Record | str]:
    """Yield the records of a metrics file, or the reason why a line is none; as scan does."""
    while line := stream.readline(_MAX_RECORD):
        if line.strip():
            yield _read(line, loads)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a log. Of a very long one the pieces, divided where no record is."""
    rest = b""
    while piece := stream.readline(_MAX_LINE):
        line, rest = rest + piece, b""
        if len(piece) == _MAX_LINE and not piece.endswith(b"\n"):
            last = line.rfind(_TAG)
            if last < 0:
                last = len(line) - len(_TAG) + 1  # the tag itself may be divided
            if len(line) - last < _MAX_LINE:
                line, rest = line[:last], line[last:]
        yield line
    if rest:
        yield rest


def _read(part: bytes, loads: Loads) -> Record | str:
    """What follows a tag: the record, or the reason why it is none."""
    text = part.strip()
    if b"\x1b" in text:
        text = _COLOUR.sub(b"", text).strip()
    crc = _CRC.search(text)
    if crc is None:
        if text.startswith(b"{"):
            return "JSON without its checksum: cut, or of another program, which prints key=value"
        return _pairs(text, part[-1:].isspace())
    if zlib.crc32(b"}", zlib.crc32(text[: crc.start()])) != int(crc[1], 16):
        return "bad checksum"
    try:
        if b"\\ud" in text:  # it may be half a surrogate pair, which orjson refuses
            loads = json.loads
        record = loads(text[: crc.end()])
    except (ValueError, RecursionError):
        return "not JSON"
    del record["crc"]
    if "v" not in record or [type(record.get(k)) for k in _IDENTITY] != [*_IDENTITY.values()]:
        return "a common field is missing"
    return record


def _pairs(text: bytes, complete: bool) -> Record | str:
    """Another program's `key=value key=value`.

    It has no checksum. So a line with anything else in it, a name twice, or a number that may have
    lost its end is rejected: another rank's output may have taken its place. What follows a
    carriage return is a progress bar, which may be written at any time.
    """
    own, _, bar = text.partition(b"\r")
    line = own.decode("utf-8", "replace").strip()
    pairs = [(key, word.rstrip(",;") or word) for key, word in _PAIR.findall(line)]
    if not pairs:
        return "no key=value"
    if not complete or bar:
        return "truncated at the end"
    if "\ufffd" in line or _PAIR.sub("", line).strip():
        return "truncated, or not key=value alone"
    if len({key for key, _ in pairs}) < len(pairs):
        return "a name twice: two lines in one"
    if any(_CUT_NUMBER.fullmatch(word) or _RUNS_ON.match(word) for _, word in pairs):
        return "a number that may have lost its end"
    record = {key: read_value(word, key) for key, word in pairs}
    if any(_DECIMAL_COMMA.fullmatch(value) for value in record.values() if type(value) is str):
        # 3,1 is no number: so 255,836 may be 255.836, and no comma is read.
        record |= {key: word.strip('"') for key, word in pairs if "," in word}
    if "v" in record:
        return "v is the version of jobkit's own records: another name is needed"
    if "epoch" in record:
        epoch = str(record["epoch"]).removesuffix(".0")
        if not re.fullmatch(r"[0-9]{1,18}", epoch):
            return f"epoch {epoch[:20]!r} is no whole number from 0 on"
        record["epoch"] = int(epoch)
    return record


def unique(records: Sequence[Record]) -> list[Record]:
    """Each record of ours once, the first one, in the order of runs, attempts and numbers."""
    first: dict[tuple[str, int, int], Record] = {}
    for record in records:
        first.setdefault((record["run_id"], record["attempt"], record["seq"]), record)
    return [first[key] for key in sorted(first)]
