"""The tolerant reader of [METRIC] lines: every whole record of a log, and a count of the rest.

    for found in scan(stream):        a log, with the tag anywhere in its lines
    for found in read_file(stream):   a metrics file: one record a line, without the tag

Both yield records and Rejected places in order, in memory that does not grow with the file. A line
that the writer wrote and nothing touched, which its checksum tells, takes a short way: nothing of
it but the record is decoded.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter, lt
from typing import Any, BinaryIO

from jobkit.metric import TAG, Record, finite

_LOOK_AHEAD = 1 << 16  # bytes after a tag in which its record must end
_BLOCK = 1 << 18  # stays in the processor cache while it is searched
_TAG = TAG.encode()
_BEGIN = b'{"v":'  # of a record of our writer, and its end: the checksum
_END = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_END_BYTES = 18
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LEAD = re.compile(rb"(?:[ \t]|\x1b\[[0-9;?]*[A-Za-z])*")
_PAIR = re.compile(r'(?<!\S)([A-Za-z_][A-Za-z0-9_.]*)=("[^"]*"|[^\s"\x00-\x1f\x7f]+)')
_NO_TEXT = re.compile(r'["\x00-\x08\x0e-\x1f\x7f]')
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_ESSENTIAL = itemgetter("kind", "run_id", "attempt", "seq")
_IDENTITY = itemgetter("run_id", "attempt", "seq")
_TYPES = (str, str, int, int, int)  # of these and of part
_TOO_LARGE = 1 << 31  # for an attempt or a record's number
_NO_INT64 = 1 << 63
# The keys of our own records; where they stand without a version, its bytes were lost.
_OWN = frozenset(("run_id", "attempt", "seq"))


def _loads(text: bytes) -> Any:
    return _DECODER.decode(text.decode())


Loads = Callable[[bytes], Any]


@dataclass(frozen=True)
class Rejected:
    """A place that should hold a record and holds no whole one: where, how long, and why."""

    offset: int
    length: int
    reason: str


def scan(
    stream: BinaryIO, *, seen: set[bytes] | None = None, loads: Loads = _loads
) -> Iterator[Record | Rejected]:
    """Yield every record in a log, and every tagged place that holds none, in order.

    A record ends within 64 KiB of its tag or is rejected. seen: the writer's lines that were read
    before; they are passed over, and those read here are added. loads: decodes one JSON object.
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
            line = buffer[body + 1 : end]
            if seen is not None and line in seen:
                position = end
            elif (record := _sealed(line, loads)) is not None:
                position = end
                if seen is not None:
                    seen.add(line)
                yield record
            else:
                found, position = _read_tagged(buffer, body, end, newline >= 0)
                yield Rejected(offset + tag, position - tag, found) if _bad(found) else found
        else:
            position = max(position, len(buffer) - len(_TAG) + 1)
        buffer, offset = buffer[position:], offset + position
        if not block:
            return


def read_file(
    stream: BinaryIO, *, seen: set[bytes] | None = None, loads: Loads = _loads
) -> Iterator[Record | Rejected]:
    """Yield the records of a metrics file; seen and loads are those of scan.

    A torn record that another one follows on its line, as after a full disk, does not hide it.
    """
    offset = 0
    while line := stream.readline(_LOOK_AHEAD):
        length = len(line)
        while len(line) == _LOOK_AHEAD and not line.endswith(b"\n"):  # longer than any record
            if not (more := stream.readline(_LOOK_AHEAD)):
                break
            length, line = length + len(more), more if more.endswith(b"\n") else line
        text = line.strip()
        if length > _LOOK_AHEAD:
            yield Rejected(offset, length, "longer than any record")
        elif seen is None or text not in seen:
            yield from _of_line(text, offset, length, seen, loads)
        offset += length


def _of_line(
    text: bytes, offset: int, length: int, seen: set[bytes] | None, loads: Loads
) -> Iterator[Record | Rejected]:
    """What a line of a metrics file holds."""
    if (record := _sealed(text, loads)) is not None:
        if seen is not None:
            seen.add(text)
        yield record
    elif text:
        last = text.rfind(_BEGIN)
        after = _sealed(text[last:], loads) if last > 0 else None
        if after:
            yield Rejected(offset, last, "torn")
            yield after
        else:
            found, _ = _read(text, complete=True)
            yield Rejected(offset, length, found) if isinstance(found, str) else found


def _sealed(line: bytes, loads: Loads) -> Record | None:
    """The record of a line that is the writer's to the last byte; None for any other.

    The checksum covers every byte before it, so that nothing of the line has to be searched.
    """
    if line.endswith(b"\r"):
        line = line[:-1]
    if not line.startswith(_BEGIN):
        return None
    crc = zlib.crc32(b"}", zlib.crc32(line[:-_END_BYTES]))
    if not line.endswith(b',"crc":"%08x"}' % crc):
        return None
    try:
        record = loads(line)
    except (ValueError, RecursionError):
        return None
    return record if _is_whole(record) else None


def _is_whole(record: Record) -> bool:
    """Whether a record of ours has the fields that tell which one it is; takes its checksum off."""
    record.pop("crc", None)
    try:
        values = _ESSENTIAL(record)
    except KeyError:
        return False
    _, _, attempt, number = values
    part = record.get("part", 0)
    types = (*map(type, values), type(part))
    return types == _TYPES and 0 <= attempt < _TOO_LARGE and 0 <= part <= number < _TOO_LARGE


def _bad(found: Record | str) -> bool:
    return isinstance(found, str)


def _read_tagged(buffer: bytes, body: int, end: int, complete: bool) -> tuple[Any, int]:
    """Read what follows a tag, in body to end; return the record, or why not, and where it ends."""
    following = buffer.find(_TAG, body, end)
    if following < 0:
        found, taken = _read(buffer[body:end], complete)
        return found, body + taken if taken else end
    # Another tag on the line: it begins a record, or it stands in the text of this one.
    own = buffer[body:following]
    found, taken = _read(own, own[-1:].isspace())
    if _bad(found) and own.lstrip()[:1] == b"{":
        found, taken = _read(buffer[body:end], complete)
    return found, following if _bad(found) or not taken else body + taken


def _read(segment: bytes, complete: bool) -> tuple[Record | str, int]:
    """Read the record that a segment begins with; return it, or why not, and the bytes it took.

    0 bytes: not known, or all of them. complete: the segment ends where its line does.
    """
    lead = _LEAD.match(segment)
    start = lead.end() if lead else 0
    if segment[start : start + 1] != b"{":
        return _pairs(segment, complete), 0
    plain = _ANSI.sub(b"", segment)
    for raw in dict.fromkeys((segment[start:], plain[plain.find(b"{") :])):
        # Bytes that are not UTF-8 become surrogates, which no JSON holds otherwise.
        text = raw.decode("utf-8", "surrogateescape")
        try:
            record, end = _DECODER.raw_decode(text)
            taken = len(text[:end].encode())
        except UnicodeEncodeError:
            return "bytes that are not UTF-8", 0
        except (ValueError, RecursionError):
            continue
        result = _judged(record, raw[:taken], raw[taken : taken + 1])
        return result, start + taken if raw == segment[start:] and not _bad(result) else 0
    return "torn or not JSON", 0


def _judged(record: Record, text: bytes, after: bytes) -> Record | str:
    """A decoded object where it is a record; the reason where it is none. after: the next byte."""
    if "v" in record or "crc" in record:
        end = _END.search(text)
        if not end or zlib.crc32(text[: end.start()] + b"}") != int(end[1], 16):
            return "checksum does not fit"
        return record if "v" in record and _is_whole(record) else "a common field is missing"
    if record.keys() >= _OWN:
        return "its checksum is lost"
    if after in (b",", b":", b"]", b"}", b'"'):
        return "the inside of a torn record"
    return _usable(record) or "empty object"


def _usable(record: Record) -> Record:
    """A foreign record; a number that 64 bits do not hold is None, as NaN is."""
    whole: Record = finite(record)
    return {k: None if type(v) is int and abs(v) >= _NO_INT64 else v for k, v in whole.items()}


def _pairs(segment: bytes, complete: bool) -> Record | str:
    """Read a foreign `key=value key=value` line."""
    own, carriage_return, _ = _ANSI.sub(b"", segment).partition(b"\r")
    try:
        line = own.decode().strip()
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    pairs = _PAIR.findall(line)
    if not pairs:
        return "no JSON object and no key=value"
    if not complete and not carriage_return:
        return "torn at the end"
    # Without a checksum, a line that holds anything that no such line has is not believed.
    if _NO_TEXT.search(_PAIR.sub("", line)):
        return "torn, or not key=value"
    return {key: _value(word) for key, word in pairs}


def _value(word: str) -> Any:
    """A word of a key=value line as a number where it is one; NaN and infinity are None."""
    if _NUMBER.fullmatch(word):
        whole = word.lstrip("+-").isdigit() and len(word) < 19  # longer ones may not be of 64 bits
        return int(word) if whole else finite(float(word))
    if _NO_NUMBER.fullmatch(word):
        return None
    return word[1:-1] if word[:1] == '"' else word


def unique(records: Sequence[Record]) -> list[Record]:
    """Each record of ours once, in the order of runs, attempts and sequence numbers."""
    keys = list(map(_IDENTITY, records))
    if all(map(lt, keys, keys[1:])):
        return list(records)  # as the writer left them
    own: dict[tuple[str, int, int], Record] = {}
    for key, record in zip(keys, records, strict=True):
        own.setdefault(key, record)
    return [own[key] for key in sorted(own)]


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
