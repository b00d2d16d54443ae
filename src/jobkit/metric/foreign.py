"""Reads one tagged place of a log: a record of ours, or another program's line.

    found, end = read_tagged(buffer, body, end, complete)
    found, taken = read(segment, complete)

Both return the record, or the reason why there is none. jobkit.metric.reader uses them for lines
that its fast path does not take.
"""

import json
import re
import zlib
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from jobkit.metric.line import TAG, Record, finite

_TAG = TAG.encode()
_END = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LEAD = re.compile(rb"(?:[ \t]|\x1b\[[0-9;?]*[A-Za-z])*")
_PAIR = re.compile(r'(?<!\S)([A-Za-z_][A-Za-z0-9_.]*)=("[^"]*"|[^\s"\x00-\x1f\x7f]+)[,;]?')
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CUT_NUMBER = re.compile(r"[+-]?[0-9]*\.|[+-]?[0-9.]+[eE][+-]?")
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
# Where an escape sequence divides a number, other output may have moved what follows it.
_DIVIDED = re.compile(rb"[0-9.](?:\x1b\[[0-9;?]*[A-Za-z])+[\w.\[]")
# A number that lost its end to what was written behind it: the word of a log, a rank's label,
# another pair. Letters alone may be its unit.
_RUNS_ON = re.compile(
    r"[+-]?[0-9][0-9.]*(?:\[|[A-Za-z_][\w.]*=|Traceback|Killed|Terminated|Aborted|Segmentation|"
    r"DEBUG|INFO|WARN|ERROR|CRITICAL|slurmstepd|srun)"
)
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
ESSENTIAL = itemgetter("kind", "run_id", "attempt", "seq")
_TYPES = (str, str, int, int, int)  # of these and of part
TOO_LARGE = 1 << 31  # for an attempt or a record's number
_NO_INT64 = 1 << 63
# The keys of our own records; where they stand without a version, its bytes were lost.
_OWN = frozenset(("run_id", "attempt", "seq"))


def loads(text: bytes) -> Any:
    """Decode one JSON object; NaN and infinity, which are not JSON, become None."""
    return _DECODER.decode(text.decode())


# The tag in UTF-16 or UTF-32, and with colours in it.
_ODD_TAG = re.compile(
    rb"\[\0{1,3}M\0{1,3}E\0{1,3}T\0{1,3}R\0{1,3}I\0{1,3}C\0{1,3}\]|"
    rb"\[(?:\x1b\[[0-9;?]{0,20}[A-Za-z])*METRIC(?:\x1b\[[0-9;?]{0,20}[A-Za-z])*\]"
)
LONGEST_TAG = 256  # bytes of one of these


def odd_tags(text: bytes) -> Iterator[tuple[int, int, str]]:
    """The tags of a log that are not written as the tag is: offset, length, what they are."""
    # A look at each letter takes long, at one byte it does not.
    in_colour = b"\x1b" in text and text.count(b"METRIC") != text.count(_TAG)
    if not in_colour and (b"\0" not in text or b"M\0" not in text):
        return
    for found in _ODD_TAG.finditer(text):
        if found[0] != _TAG:
            why = "UTF-16 inside" if b"\0" in found[0] else "an escape sequence inside the tag"
            yield found.start(), len(found[0]), why


class _Twice(Exception):
    """An object has a name twice: it is made of two lines."""


def _each_once(pairs: list[tuple[str, Any]]) -> Record:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


_STRICT = json.JSONDecoder(parse_constant=lambda _: None, object_pairs_hook=_each_once)


def is_whole(record: Record) -> bool:
    """Whether a record of ours has its identifying fields; removes its checksum."""
    record.pop("crc", None)
    try:
        values = ESSENTIAL(record)
    except KeyError:
        return False
    _, _, attempt, number = values
    part = record.get("part", 0)
    types = (*map(type, values), type(part))
    return types == _TYPES and 0 <= attempt < TOO_LARGE and 0 <= part <= number < TOO_LARGE


# How a line begins that follows one which may have been interrupted, behind the label of a rank or
# a time, if any: a new start, the words of Slurm, of a shell or of a crash.
_INTERRUPTS = re.compile(
    rb"(?:\[?[\w.,-]{1,40}\]?(?:<std(?:out|err)>)?[:|] ?|[0-9][0-9T:.,Z/+ -]{9,35}[ |] ?)?"
    rb"(?:\[jobkit\] start|srun: |slurmstepd: |=== |Traceback \(|Fatal Python error|"
    rb"\*\*\* (?:STEP|JOB|SIG[A-Z]+|Error in|Process received|Aborted|stack smash|buffer over)|"
    rb"(?:Killed|Terminated|Aborted|Segmentation fault|Bus error)(?: \(core dumped\))?\s*(?:\n|$)|"
    rb"terminate called|(?:bash|sh|[^ \n]*(?:/slurm_script|\.sh)): |"
    rb"(?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::(?! ?[0-9.+-]+\s)|\s*(?:\n|$))|"
    rb"(?:free\(\)|double free|malloc\(|corrupted (?:size|double))|\[?E[0-9]{4} )"
)
# Or with the rest of a number alone, or before another pair.
_REST = re.compile(rb"[.eE+-]*[0-9][0-9.eE+-]*(?:\r?(?:\n|$)|[\s,;]+[A-Za-z_][\w.]*=)")


def may_be_cut(following: bytes, by_numbers: bool = True) -> bool:
    """Whether a line may have lost its end, from what follows its newline.

    by_numbers: a number alone on the next line may be the rest of this one's last.
    """
    begin = _ANSI.sub(b"", following).lstrip(b"\r\n\0\t ")
    return bool(_INTERRUPTS.match(begin) or (by_numbers and _REST.match(begin)))


def is_bad(found: Record | str) -> bool:
    return isinstance(found, str)


def read_tagged(buffer: bytes, body: int, end: int, complete: bool) -> tuple[Any, int]:
    """Read what follows a tag, in body to end; return the record, or why not, and where it ends."""
    following = buffer.find(_TAG, body, end)
    if following < 0:
        found, taken = read(buffer[body:end], complete)
        return found, body + taken if taken else end
    # Another tag on the line: it begins a record, or it stands in the text of this one.
    own = buffer[body:following]
    found, taken = read(own, own[-1:].isspace())
    if is_bad(found) and own.lstrip()[:1] == b"{":
        found, taken = read(buffer[body:end], complete)
    return found, following if is_bad(found) or not taken else body + taken


def read(segment: bytes, complete: bool) -> tuple[Record | str, int]:
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
            record, end = _STRICT.raw_decode(text)
            taken = len(text[:end].encode())
        except UnicodeEncodeError:
            return "bytes that are not UTF-8", 0
        except _Twice:
            return "a name twice: two lines in one", 0
        except (ValueError, RecursionError):
            continue
        result = _judged(record, raw[:taken], raw[taken : taken + 1])
        if raw == plain[plain.find(b"{") :] and "v" not in record and _DIVIDED.search(segment):
            return "an escape sequence inside a number", 0
        return result, start + taken if raw == segment[start:] and not is_bad(result) else 0
    return "truncated or not JSON", 0


def _judged(record: Record, text: bytes, after: bytes) -> Record | str:
    """A decoded object where it is a record; the reason where it is none. after: the next byte."""
    if "v" in record or "crc" in record:
        end = _END.search(text)
        if not end or zlib.crc32(text[: end.start()] + b"}") != int(end[1], 16):
            return "bad checksum"
        return record if "v" in record and is_whole(record) else "a common field is missing"
    if record.keys() >= _OWN:
        return "checksum missing"
    if after in (b",", b":", b"]", b"}", b'"'):
        return "the inside of a truncated record"
    return _usable(record) or "empty object"


def _usable(record: Record) -> Record | str:
    """A foreign record; a number that 64 bits do not hold is None, as NaN is."""
    whole: Record = finite(record)
    return _with_epoch({k: _in_range(v) for k, v in whole.items()})


def _in_range(value: Any) -> Any:
    return None if type(value) is int and abs(value) >= _NO_INT64 else value


def _with_epoch(record: Record) -> Record | str:
    """A foreign record with its epoch as a whole number; the reason where it is none."""
    epoch = record.get("epoch", 0)
    if isinstance(epoch, str) and epoch.isdecimal() and len(epoch) < 19:
        epoch = int(epoch)
    if isinstance(epoch, float) and epoch.is_integer():
        epoch = int(epoch)
    if type(epoch) is not int or epoch < 0:
        return f"epoch {str(record['epoch'])[:20]!r} is no whole number from 0 on"
    return {**record, "epoch": epoch} if "epoch" in record else record


def _pairs(segment: bytes, complete: bool) -> Record | str:
    """Read a foreign `key=value key=value` line.

    It has no checksum. So a line with anything else in it, a name twice, or a number that may have
    lost its end is rejected: another rank's output may have taken its place. What follows a
    carriage return is a progress bar, which may be written at any time.
    """
    if _DIVIDED.search(segment):
        return "an escape sequence inside a number"
    own, _, bar = _ANSI.sub(b"", segment).partition(b"\r")
    try:
        line = own.decode().strip()
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    pairs = [(key, word.rstrip(",;") or word) for key, word in _PAIR.findall(line)]
    if not pairs:
        return "no JSON object and no key=value"
    if (not complete or bar.strip(b"\r")) and not line.endswith('"'):
        return "truncated at the end"
    if _PAIR.sub("", line).strip():
        return "truncated, or not key=value alone"
    if len({key for key, _ in pairs}) < len(pairs):
        return "a name twice: two lines in one"
    if any(_CUT_NUMBER.fullmatch(word) for _, word in pairs):
        return "a number that ends with its point"
    if any(_RUNS_ON.match(word) for _, word in pairs):
        return "a number that runs into other words"
    return _with_epoch({key: _value(word) for key, word in pairs})


def _value(word: str) -> Any:
    """A word of a key=value line as a number where it is one; NaN and infinity are None."""
    if _NUMBER.fullmatch(word):
        whole = word.lstrip("+-").isdigit() and len(word) < 19  # longer ones may not be of 64 bits
        return int(word) if whole else finite(float(word))
    if _NO_NUMBER.fullmatch(word):
        return None
    return word[1:-1] if word[:1] == '"' else word
