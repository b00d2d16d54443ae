"""The tolerant reader of [METRIC] lines: every complete record of a log, and the rejected rest.

    for found in scan(stream):        a log, with the tag anywhere in its lines
    for found in read_file(stream):   a metrics file: one record a line, without the tag

Both yield records and Rejected places in order, in memory that does not grow with the file. A line
whose checksum matches takes a fast path: only its record is decoded.
"""

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import itemgetter, lt
from typing import Any, BinaryIO

from jobkit.metric.foreign import (
    ESSENTIAL,
    LONGEST_TAG,
    TOO_LARGE,
    is_bad,
    is_whole,
    loads,
    may_be_cut,
    odd_tags,
    read,
    read_tagged,
)
from jobkit.metric.line import TAG, Record

_LOOK_AHEAD = 1 << 16  # bytes after a tag in which its record must end
_PEEK = 64  # bytes of what follows a line: they may say that it was interrupted
_BLOCK = 1 << 18  # stays in the processor cache while it is searched
_TAG = TAG.encode()
_BEGIN = b'{"v":'  # of a record of our writer, and its end: the checksum
_END_BYTES = 18
_IDENTITY = itemgetter("run_id", "attempt", "seq")

Loads = Callable[[bytes], Any]


@dataclass(frozen=True)
class Rejected:
    """A tagged place without a complete record: its offset, length, and the reason."""

    offset: int
    length: int
    reason: str


def scan(
    stream: BinaryIO, *, seen: set[bytes] | None = None, loads: Loads = loads
) -> Iterator[Record | Rejected]:
    """Yield every record in a log, and every tagged place without one, in order.

    A record ends within 64 KiB of its tag or is rejected. seen: the writer's lines that were read
    before; they are skipped, and those read here are added. loads: decodes one JSON object.
    """
    buffer, offset = b"", 0
    while True:
        block = stream.read(_BLOCK)
        buffer += block
        position = buffer.rfind(b"\n") + 1  # what follows is not read yet
        records = _untouched(_tagged_lines(buffer[:position]), seen, loads) if position else None
        if records is not None:
            yield from records
        else:
            position = yield from _mixed(buffer, offset, not block, seen, loads)
        for start, length, reason in odd_tags(buffer):
            if start < position:  # else it is found once more
                yield Rejected(offset + start, length, reason)
        buffer, offset = buffer[position:], offset + position
        if not block:
            return


def _mixed(
    buffer: bytes, offset: int, last: bool, seen: set[bytes] | None, loads: Loads
) -> Generator[Record | Rejected, None, int]:
    """Yield what part of a log holds, tag by tag; return the offset of the unread rest."""
    position = 0
    while (tag := buffer.find(_TAG, position)) >= 0:
        body = tag + len(_TAG)
        newline = buffer.find(b"\n", body, body + _LOOK_AHEAD)
        if newline < 0 and not last and len(buffer) - body < _LOOK_AHEAD:
            return tag  # the end of this line is not read yet
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
            after = buffer[newline + 1 : newline + 1 + _PEEK] if newline >= 0 else b""
            if newline >= 0 and not last and len(after) < _PEEK:
                return tag  # what follows this line is not read yet
            whole = newline >= 0 and not may_be_cut(after)
            found, position = read_tagged(buffer, body, end, whole)
            yield Rejected(offset + tag, position - tag, found) if is_bad(found) else found
    return len(buffer) if last else max(position, len(buffer) - LONGEST_TAG)


def read_file(
    stream: BinaryIO, *, seen: set[bytes] | None = None, loads: Loads = loads
) -> Iterator[Record | Rejected]:
    """Yield the records of a metrics file; seen and loads are those of scan.

    A truncated record does not hide another one that follows on its line, as after a full disk.
    """
    offset = 0
    while block := stream.read(_BLOCK):
        block += stream.readline(_LOOK_AHEAD)  # to the end of its last line
        lines = block[:-1].split(b"\n") if block.endswith(b"\n") else None
        if (records := _untouched(lines, seen, loads)) is not None:
            yield from records
            offset += len(block)
            continue
        for line, length in _lines(block, stream):
            text = line.strip()
            if length > _LOOK_AHEAD:
                yield Rejected(offset, length, "longer than any record")
            elif seen is None or text not in seen:
                whole = line.endswith(b"\n")
                yield from _of_line(text, whole, offset, length, seen, loads)
            offset += length


def _lines(block: bytes, stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The lines of a block, the last of them to its end, and their lengths.

    Of a line longer than any record, only the last piece, to bound the memory.
    """
    inside, line, length = BytesIO(block), b"", 0
    while piece := inside.readline(_LOOK_AHEAD) or stream.readline(_LOOK_AHEAD):
        line, length = piece, length + len(piece)
        if piece.endswith(b"\n"):
            yield line, length
            length = 0
            if inside.tell() == len(block):
                return
    if length:
        yield line, length


def _tagged_lines(text: bytes) -> list[bytes] | None:
    """What follows the tag on each line with one; None where a line has more than one."""
    parts = text.split(_TAG)[1:]
    try:
        return [part[1 : part.index(b"\n")] for part in parts]
    except ValueError:
        return None


def _untouched(
    lines: list[bytes] | None, seen: set[bytes] | None, loads: Loads
) -> list[Record] | None:
    """The records of lines that all have a valid checksum, without those in seen.

    None if one of them has not: then they are read one by one. It does what _sealed does, for many
    lines at once.
    """
    if lines is None:
        return None
    if seen is not None:
        if seen.issuperset(lines):
            return []
        lines = [line for line in dict.fromkeys(lines) if line not in seen]
    crcs = [zlib.crc32(b"}", zlib.crc32(line[:-_END_BYTES])) for line in lines]
    if [line[-_END_BYTES:] for line in lines] != [b',"crc":"%08x"}' % crc for crc in crcs]:
        return None
    if not all(line.startswith(_BEGIN) for line in lines):
        return None
    try:
        records = list(map(loads, lines))
    except (ValueError, RecursionError):
        return None
    if not _all_whole(records):
        return None
    if seen is not None:
        seen.update(lines)
    return records


def _of_line(
    text: bytes, whole: bool, offset: int, length: int, seen: set[bytes] | None, loads: Loads
) -> Iterator[Record | Rejected]:
    """What a line of a metrics file holds. whole: its newline was written."""
    if (record := _sealed(text, loads)) is not None:
        if seen is not None:
            seen.add(text)
        yield record
    elif text:
        last = text.rfind(_BEGIN)
        after = _sealed(text[last:], loads) if last > 0 else None
        if after:
            yield Rejected(offset, last, "truncated")
            yield after
        else:
            found, _ = read(text, complete=whole)
            yield Rejected(offset, length, found) if isinstance(found, str) else found


def _sealed(line: bytes, loads: Loads) -> Record | None:
    """The record of a line with a valid checksum; None for any other line.

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
    return record if is_whole(record) else None


def _all_whole(records: list[Record]) -> bool:
    """Whether all records are whole, as is_whole says of one."""
    if any("part" in record for record in records):
        return all(map(is_whole, records))
    for record in records:
        del record["crc"]
    try:
        kinds, runs, attempts, numbers = zip(*map(ESSENTIAL, records), strict=True)
    except (KeyError, ValueError):
        return not records
    texts, counts = set(map(type, (*kinds, *runs))), set(map(type, (*attempts, *numbers)))
    if texts != {str} or counts != {int}:
        return False
    return min(*attempts, *numbers) >= 0 and max(*attempts, *numbers) < TOO_LARGE


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
    """Join the records that split made of one; nested objects are merged.

    Where a part is missing, the record has incomplete: true.
    """
    whole: Record = {}
    pieces = list(records)
    for record in pieces:
        for key, value in record.items():
            if isinstance(value, dict) and isinstance(whole.get(key), dict):
                whole[key] = {**whole[key], **value}
            else:
                whole.setdefault(key, value)
    whole.pop("part", None)
    parts = whole.pop("parts", None)
    if type(parts) is int and parts != len({r.get("part") for r in pieces}):
        whole["incomplete"] = True
    return whole
