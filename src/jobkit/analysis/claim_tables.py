"""The tables of a text: Markdown, CSV, LaTeX or aligned columns; what a column is of, by its head.

What is not certain has no role: a column of another quantity, an end of an interval, a cell with
more than one number.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NUMBER = r"\d[\d,.' \u00a0\u202f]*\d|\d"
_SECONDS = {"us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0}
_SECONDS |= {"min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0}
_UNIT = "|".join(sorted(_SECONDS, key=len, reverse=True))
_CELL = re.compile(
    rf"(?P<value>{_NUMBER})(?P<scale>[kMG])?\s?(?P<unit>x|\u00d7|%|(?:{_UNIT})s?(?![a-z]))?"
    r"(?:\s?[a-zA-Z]+\s?/\s?\w+)?(?:\s*[\[(][^\])]*[\])])?"
)
_SIZE = r"^(?:#|number of|no\. of|num)?[ _]*(?:{})s?(?: \(#\))?$"
_PER_S = r"(?:/|\bper[ _]|_per_)\s?(?:s|sec|ms|second|min|hour|h)\b"
# The first that is found in a head is its role; the empty one tells nothing of the scaling.
_OTHER = (
    r"ideal|theor|statistic|\$|expect|target|cost|loss|accura|utili|overhead|std|energy|power|memory|batch|"
    r"(?:gpu|node|core|cpu|device|rank|process)[ _-]?h|\b(?:over|vs\.?|than|relative|from)\b|"
    r"_(?:low|high)(?:_|\b)|\b(?:low|upp)er|\b(?:min|max)(?:imum)?$|\bci\b|forecast|predict"
)
_OF_TWO = r"speed[ _-]?up.*\(.*(?: - | to ).*\)"  # of one precision over another, say
_ROLES = (
    ("gpus", _SIZE.format("gpu|rank|process|processes|device|worker|accelerator|world[ _]size")),
    ("nodes", _SIZE.format("node|machine|host")),
    ("cores", _SIZE.format("core|cpu|thread")),
    ("efficiency", r"efficien"),
    ("speed_up", r"speed[ _-]?up"),
    ("scaling", r"\bscaling\b"),
    ("rate", rf"throughput|\brate\b|{_PER_S}"),
    ("time", rf"time|wall|elapsed|duration|latency|\b(?:{_UNIT})s?\b"),
)
SIZES = ("gpus", "nodes", "cores")
_STACKED = re.compile(r"\\shortstack(?:\[\w\])?\{([^{}]*)\}")  # a head of several lines


@dataclass(frozen=True)
class Number:
    """A number as it is written, and the interval of the values that would be written so."""

    text: str
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """The numbers of a column, in the order of the rows; None where a cell has not one alone."""

    role: str
    head: str
    numbers: list[Number | None]


@dataclass(frozen=True)
class Table:
    """A table: the line of each row, the columns with a role, the words that tell rows apart."""

    lines: list[int]
    columns: list[Column]
    series: list[str]
    context: str  # the heading above and those of the columns, in small letters


def number(cell: str, head: str = "", role: str = "") -> Number | None:
    """The one number of a cell: 2,840 or 1.95x, 85 %, 12 min; a time in seconds."""
    found = _CELL.fullmatch(cell.strip(" *$~"))
    if not found:
        return None
    plain = re.sub(r"[' \u00a0\u202f]", "", found["value"])
    marks = re.findall(r"[.,]", plain)
    decimal = marks[-1] if marks and (len({*marks}) > 1 or len(marks) == 1) else ""
    if marks == [","] and re.fullmatch(r"[1-9]\d{0,2},\d{3}", plain):
        decimal = ""  # of thousands
    digits = "".join("." if c == decimal else c for c in plain if c.isdigit() or c == decimal)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(found["scale"] or "", 1.0)
    if role == "time":
        words = re.split(r"[^\w\u00b5]+|_", head.lower())
        units = [w for w in words if w.removesuffix("s") in _SECONDS or w in _SECONDS]
        unit = found["unit"] or (units[-1] if units else "s")
        scale *= _SECONDS.get(unit) or _SECONDS[unit.removesuffix("s")]
    half = 10.0 ** -len(digits.partition(".")[2]) / 2
    value = float(digits)
    return Number(cell.strip(" *$"), (value - half) * scale, (value + half) * scale)


def tables_of(text: str) -> Iterator[Table]:
    """Every table of a text, with the lines counted from 1."""
    lines = text.splitlines()
    context, block, way = "", list[tuple[int, list[str]]](), ""
    for i, line in enumerate([*lines, ""], 1):
        how, cells = _cells(line, way)
        if block and (how != way or (cells and len(cells) != len(block[0][1]))):
            yield from _table(block, context)
            block = []
        way = how
        if cells:
            block.append((i, cells))
        if line.startswith(("#", "**")) or "\\caption" in line:
            context = line.lower()


def _cells(line: str, way: str) -> tuple[str, list[str]]:
    """How a line divides its cells, and these; a rule goes on with the table above."""
    if re.fullmatch(r"[\s|:+=-]+|\s*\\(?:hline|\w*rule(?:\{.*\})?)\s*", line) and line.strip():
        return way, []
    line = _STACKED.sub(lambda head: head[1].replace("\\\\", " "), line)
    if re.search(r"(?<!\\)&", line) and "\\\\" in line:
        plain = re.sub(r"\\(?:text\w\w|mathbf|hline|\w*rule)\b|\\\\.*|[{}$]", "", line)
        cells = re.split(r"(?<!\\)&", plain.replace("\\times", "x"))
        return "&", [re.sub(r"\\([%_#&])", r"\1", c).replace("\\", "").strip() for c in cells]
    if line.count("|") > 1:
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        return "|", [re.sub(r"\*\*|`|<[^>]*>|\\(?=\W)", "", c).strip() for c in cells]
    for mark in ("\t", ";", ","):
        if line.count(mark) and not re.search(rf"{mark} \w+ \w+ ", line):
            return mark, [c.strip() for c in next(csv.reader([line], delimiter=mark))]
    cells = re.split(r"\s{2,}", line.strip())
    return ("  ", cells) if len(cells) > 1 else ("", [])


def _role(head: str) -> str | None:
    bare = re.sub(r"[(\[].*?[)\]]", "", head)
    if re.search(_OTHER, bare, re.I) or re.search(_OF_TWO, head, re.I):
        return ""
    return next((role for role, words in _ROLES if re.search(words, head, re.I)), None)


def _table(block: Sequence[tuple[int, list[str]]], context: str) -> Iterator[Table]:
    heads, body = block[0][1], block[1:]
    if not body or not {*map(_role, heads)} & {*SIZES}:
        return
    columns, words, counts = list[Column](), list[list[str]](), list[list[str]]()
    for i, head in enumerate(heads):
        texts = [cells[i] for _, cells in body]
        role = _role(head)
        if role is None:  # TF32 | 1078 img/s
            role = _role(next((t for t in texts if t[:1].isdigit()), "")) or ""
            role = role if role in ("rate", "time") else ""
        numbers = [number(t, head, role) for t in texts]
        if role == "scaling":  # a speed-up, or an efficiency
            most = max((n.high for n in numbers if n), default=0.0)
            role = "speed_up" if most > 1.2 else "efficiency"
        if role and any(numbers):
            columns.append(Column(role, head, numbers))
        elif any(re.search("[a-z]", t, re.I) and not number(t) for t in texts):
            filled = list[str]()
            for one in texts:
                filled.append(one.lower() or (filled[-1] if filled else ""))
            words.append(filled)
        else:
            counts.append(texts)
    if not (sized := [c for unit in SIZES for c in columns if c.role == unit]):
        return
    size = sized[0]
    series = [" ".join(own) for own in zip(*words, strict=True)] or [""] * len(body)
    for texts in counts:  # as a batch per GPU, where it tells rows of one size apart
        places = [(s, n and n.low) for s, n in zip(series, size.numbers, strict=True)]
        if len({*places}) < len(places):
            series = [f"{s} {t}" for s, t in zip(series, texts, strict=True)]
    yield Table([n for n, _ in body], columns, series, " ".join([context, *heads]).lower())
