"""The rows of a document: what is said of one size, in a table, a code block or a sentence.

A row joins a size with times, rates and claims only where they are in the same row of a table, the
same line or the same sentence.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from markdown_it import MarkdownIt

from jobkit.analysis.claims.numbers import NUMBER, UNIT, WRITTEN, Number, number, seconds

# The meaning of a heading; the first match counts, so that "samples/s" is no number of samples.
_PER_S = r"(?:/|\bper[ _]|_per_)\s?(?:s|sec|secs|second|min|minute|h|hour|day)\b|\bfps\b|flops"
_PER_RANK = r"(?:/|\bper[ _-]?)\s?(?:gpu|node|rank|device|core|worker)"
_ROLES = (
    (
        "",
        r"ideal|theor|expect|target|cost|loss|accura|utili|overhead|std|energy|power|(?:gpu|node|core|cpu|device|rank|process).?hours",
    ),
    ("efficiency", r"efficien"),
    ("speed_up", r"speed[ _-]?up|accelerat|\bfaster"),
    ("scaling", r"scaling"),
    ("memory", r"memory|vram|\bram\b"),
    ("rate", rf"throughput|\brate\b|{_PER_S}"),
    ("time", r"time|wall|elapsed|duration|latency|seconds|minutes|hours|\b(?:s|sec|ms|min)\b"),
    ("", rf"{_PER_RANK}|batch"),
    ("gpus", r"gpus?\b|\branks?\b|\bprocess|world[ _]?size|\bdevices?\b|workers?\b|\bnprocs?\b"),
    ("cores", r"\bcores?\b|\bcpus?\b|threads?\b"),
    ("nodes", r"\bnodes?\b|machines?\b"),
    ("samples", r"samples|images"),
    ("epochs", r"epochs"),
)
# An end of an interval, or an extreme; in brackets it tells of the same value, and min is minutes.
_BOUND = r"(?:\b|_)(?:(?:low|upp|high(?!-))(?:er)?|c\.?i|max(?:imum)?|minimum)(?:\b|_)(?! is)"
UNITS = {"gpus": "gprdw", "cores": "ct", "nodes": "nm"}  # first letters of their words
_COUNTS = {"single": 1, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}
_SIZE = re.compile(
    rf"(?<![\w.])(\d+|{'|'.join(_COUNTS)})[ -]?(?:x |total |nvidia |[avh]\d+ )*"
    r"(gpu|rank|process(?:e(?=s))?|device|worker|core|cpu|thread|node|machine)s?\b(?!\s*(?:per|/))",
    re.I,
)
_LIST = re.compile(
    rf"((?:{NUMBER}(?:[x%]?(?:, | and |, and |/)))+)({NUMBER})(\s?[x%]|\s[a-z]+)", re.I
)
_SAID = (  # in lines and sentences; what an earlier one has taken no later one sees
    ("rate", rf"({WRITTEN})\s*(?:[a-z]+\s?)?(?:/|per )\s?(?:s|sec|second)s?\b"),
    ("time", rf"({WRITTEN})\s*{UNIT}(?:\s?/\s?\w+)?"),
    ("speed_up", rf"({WRITTEN})(?:\s?[x\u00d7](?!\w|\s*\d)|[- ](?:times|fold)\b)"),
    ("percent", rf"({WRITTEN})\s?(?:%|per ?cent\b)"),
)
_EFFICIENCY = r"(?<!memory )(?:efficien\w*|\bscal(?:es|ing|ed)\b)[^.%\d]{0,30}$"
_EFFICIENT = r"^[^.%\d]{0,20}(?<!memory )efficien"
_FASTER = r"speeds?[ -]?up|faster|quicker|scal|^\W*(?:on|at|with|using)\b"
_UNSURE = r"theor|ideal|expect|target|would|up to|goal|should|\bif\b|than (?:last|the )|\bCPU\b"
_FILLER = re.compile(
    r"(?:speed|up|speedup|throughput|training|train|time|times|to|of|total|x|average|"
    r"avg|scaling|gpu|efficiency|gpus|multi|parallel|relative|vs|over|single|node|"
    r"nodes|per|epoch|step|s|sec|ms|min|h|hours|img|images|samples|tokens|rate|"
    r"measured|strong|weak|wall|clock|with|and|on|at|baseline|second|percent|"
    r"percentage|usage)"
)
_LINEAR, _LEAST_LINEAR = r"(?<!near.)\blinear scaling\b(?! (?:rule|of the learning))", 95.0
_BASE = re.compile(r"\b(?:than|over|versus|vs|compared|relative|from)\b", re.I)
_ITEMS = re.compile(r"\s*(\w+) = \[(.+)\]\s*(#.*)?$")  # a list in Python
_Lines = list[tuple[int, str]]
_Cells = list[tuple[int, list[str]]]  # with the line of each row


@dataclass(frozen=True)
class Quantity:
    """A number in a row: what it is of, and the words of its heading that tell it from others."""

    kind: str
    number: Number
    words: frozenset[str] = frozenset()
    per_rank: bool = False
    said: str = ""  # the heading, the line or the sentence that it is in


@dataclass(frozen=True)
class Row:
    """What is said of one size."""

    block: int  # the rows of one table, list or code block have the same
    line: int
    sizes: Mapping[str, float]  # by UNITS
    values: Sequence[Quantity]
    series: str = ""
    context: str = ""  # the headings above, and those of the columns
    base: float = 0.0  # the size compared with, where a sentence names it
    loose: bool = False  # a line or a sentence, which may speak of a table elsewhere


def rows_of(text: str) -> Iterator[Row]:
    """Every row of a Markdown or CSV file."""
    lines = [(i, t) for i, t in enumerate(text.splitlines(), 1) if t.strip() and t[0] != "#"]
    cells = _aligned(lines, max(",;\t", key=lines[0][1].count)) if lines else []
    if len(cells) > 1 and len(cells) == len(lines):
        yield from _table(0, cells, "")
        return
    above, caption, level, block = [""], "", 0, 0
    cells = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line, context = (token.map or [0])[0] + 1, "\n".join([*above, caption])
        block += token.level == 0 and token.nesting >= 0
        plain = re.sub(r"\*\*|__|`|<[^>]*>|\]\([^)]*\)", "", token.content)
        if token.type == "heading_open":
            level, caption = int(token.tag[1]), ""
        elif token.type == "tr_open":
            cells.append((line, []))
        elif token.type == "table_close":
            yield from _table(block, cells, context)
            cells = []
        elif cells and token.type == "inline":
            cells[-1][1].append(plain)
        elif level and token.type == "inline":
            above[level:], level = [plain], 0
        elif token.type == "inline":
            caption = plain if len(plain) < 100 else ""
            yield from _lines(block, list(enumerate(plain.splitlines(), line)), context)
        elif token.content:
            code = list(enumerate(plain.splitlines(), line + 1))
            found = _aligned(code, r"\s{2,}|\t|\s*\|\s*") or _aligned(code, ",")
            yield from _table(block, found, context) if found else _lines(block, code, context)


def _aligned(lines: _Lines, delimiter: str) -> _Cells:
    """The cells of a table in plain text, from its headings on; empty where there is none."""
    if len(delimiter) == 1:
        cells = [list(row) for row in csv.reader([t for _, t in lines], delimiter=delimiter)]
    else:
        cells = [re.split(delimiter, t.strip(" |")) for _, t in lines]
    if delimiter == ";":  # 1.234,567
        cells = [[re.sub(r"[.]?(\d+),(\d+)", r"\1.\2", c) for c in row] for row in cells]
    for i, row in enumerate(cells):
        roles = [_role(head) for head in row if not re.search(r"\d{2}|:", head)]
        if set(roles) & set(UNITS) and len(set(roles) - {""}) > 1:
            rest = zip(lines[i:], cells[i:], strict=False)
            return [(n, c) for (n, _), c in rest if len(c) == len(row)]
    return []


def _role(head: str, heads: str = "") -> str:
    """What a column is of. heads: those of the whole table."""
    role = next((role for role, words in _ROLES if re.search(words, head, re.I)), "")
    if role in ("", "memory", *UNITS):
        return role
    least = r"(?:\b|_)min(?:\b|_)" if "max" in heads else r"(?:\b|_)min[ _](?!per)"
    bare = re.sub(r"[(\[].*?[)\]]", "", head)
    return "bound" if re.search(f"{_BOUND}|{least}", bare, re.I) else role


def headings(text: str) -> list[int]:
    """The lines that begin a section of a Markdown file, counted from 0."""
    tokens = MarkdownIt("commonmark").parse(text)
    return [t.map[0] for t in tokens if t.type == "heading_open" and t.map]


def _words(text: str) -> list[str]:
    found = re.findall(r"[a-z]+\d*|\d+", _SIZE.sub("", text).lower())
    return [word for word in found if not _FILLER.fullmatch(word)]


def _sizes(text: str) -> list[tuple[str, float, int]]:
    """The sizes in a text: their unit, their number, and where they begin."""
    unit = {letter: name for name, letters in UNITS.items() for letter in letters}
    return [
        (
            unit["t" if m[2] == "cpu" else m[2][0].lower()],
            float(_COUNTS.get(m[1].lower()) or m[1]),
            m.start(),
        )
        for m in _SIZE.finditer(text)
    ]


def _table(block: int, cells: _Cells, context: str) -> Iterator[Row]:
    if all(head[:1].isdigit() for head in cells[0][1][1:]):  # the sizes stand along the top
        turned = zip_longest(*(row for _, row in cells), fillvalue="")
        cells = [(cells[0][0], list(row)) for row in turned]
    heads, body = cells[0][1], cells[1:]
    context = "\n".join([context, *heads]).lower()
    sizes: list[dict[str, float]] = [{} for _ in body]
    values: list[list[Quantity]] = [[] for _ in body]
    labels: list[list[str]] = []
    for column, head in enumerate(heads):
        texts = [row[column] if column < len(row) else "" for _, row in body]
        role = _role(head, context) or _role(next((t for t in texts if t[:1].isdigit()), ""))
        counts = [_count(text) if role in UNITS else 0.0 for text in texts]
        for size, count in zip(sizes, counts, strict=True):
            if count:
                size.setdefault(role, count)
        if role in ("", *UNITS) and not any(counts):
            for i, text in enumerate(texts):
                for unit, n, _ in _sizes(text):
                    sizes[i].setdefault(unit, n)
            labels.append([" ".join(_words(text)) for text in texts])
        elif role not in ("", *UNITS):
            for i, quantity in enumerate(_column(role, head, texts)):
                values[i] += [quantity] if quantity else []
    series = _series(labels, sizes)
    for i, (line, _) in enumerate(body):
        yield Row(block, line, sizes[i], values[i], series[i], context)


def _count(text: str) -> float:
    """The size in a cell: 8, 8x A100 or 2x8; 0 for a name such as A100."""
    if re.match(r"\W*(?:serial|sequential|single|baseline)", text, re.I):
        return 1.0
    found = re.match(r"[^\w.]*(\d+)(?:\s?[x\u00d7]\s?(\d+))?(?=$|[^\w.]|\s?[x\u00d7])", text)
    return float(found[1]) * float(found[2] or 1) if found else 0.0


def _column(role: str, head: str, texts: list[str]) -> list[Quantity | None]:
    found = [seconds(t, head) if role == "time" else number(t) for t in texts]
    found = [n if n and n.low > 0 else None for n in found]
    most = max((n.high for n in found if n), default=0.0)
    percent = any("%" in text for text in (head, *texts))
    factor = 100.0 if role == "efficiency" and not percent and most < 3 else 1.0
    if role == "scaling":  # a speed-up, also as 393 %, or an efficiency, also as 0.98
        role = "speed_up" if most > (150.0 if percent else 1.2) else "efficiency"
        factor = (0.01 if percent else 1.0) if role == "speed_up" else 1.0 if percent else 100.0
    words, per = frozenset(_words(head)), bool(re.search(_PER_RANK, head, re.I))
    return [Quantity(role, n.times(factor), words, per, head) if n else None for n in found]


def _series(labels: list[list[str]], sizes: list[dict[str, float]]) -> list[str]:
    """The series of each row: the labels that tell rows of one size apart, or that come again."""
    series = [""] * len(sizes)
    for label in sorted(labels, key=lambda texts: not any(re.search("[a-z]", t) for t in texts)):
        for i, text in enumerate(label):
            label[i] = text or (label[i - 1] if i else "")  # only the first row of a group has it
        apart = [f"{old} {new}".strip() for old, new in zip(series, label, strict=True)]
        again = len({(s, *n.values()) for s, n in zip(series, sizes, strict=True)}) < len(sizes)
        in_words = any(re.search("[a-z]", text) for text in label)
        if (in_words and (again or len(set(label)) < len(label))) or (
            again and len(set(apart)) < len(apart)
        ):
            series = apart
    return series


def _lines(block: int, lines: _Lines, context: str) -> Iterator[Row]:
    items = [(n, m) for n, text in lines if (m := _ITEMS.match(text))]
    alike = [(n, m) for n, m in items if m[2].count(",") == items[0][1][2].count(",")]
    if len(alike) > 1:
        heads = [f"{m[1]} {m[3] or ''}".replace("_", " ") for _, m in alike]
        turned = zip(*([t.strip(" '\"") for t in m[2].split(",")] for _, m in alike), strict=True)
        yield from _table(block, [(alike[0][0], h) for h in (heads, *map(list, turned))], context)
        lines = [line for line in lines if not _ITEMS.match(line[1])]
    if lines and sum(bool(re.search(r"[:=|]", t)) for _, t in lines) * 2 < len(lines):
        sentences = re.split(r"(?<=[.!?;])\s+", " ".join(t for _, t in lines))
        lines = [(lines[0][0], sentence) for sentence in sentences]
    for line, text in lines:
        yield from _said(Row(block, line, {}, [], context=context.lower(), loose=True), text)


def _said(row: Row, text: str) -> Iterator[Row]:
    """The rows of a line or a sentence; numbers that no one size goes with have none."""
    text = _LIST.sub(
        lambda m: re.sub(r"(?<=\d)[x%]?(?:, and |, | and |/)", f"{m[3]}, ", m[0]), text
    )
    sizes, rest = _sizes(text), _SIZE.sub(lambda m: " " * len(m[0]), text)
    values: list[Quantity] = []
    for kind, pattern in _SAID:
        for found in re.finditer(pattern, rest, re.I):
            before, after = rest[: found.start()], rest[found.end() :]
            what = kind
            if kind == "speed_up" and not re.search(_FASTER, f"{before} {after}", re.I):
                what = "factor"
            if kind == "percent" and (
                re.search(_EFFICIENCY, before, re.I) or re.search(_EFFICIENT, after, re.I)
            ):
                what = "efficiency"
            if what in ("speed_up", "efficiency") and re.search(_UNSURE, text, re.I):
                what = "factor"
            read = (seconds if kind == "time" else number)(found[0])
            if read and (kind != "time" or read.low > 0):
                values.append(Quantity(what, replace(read, text=found[0].strip()), said=text))
        rest = re.sub(pattern, lambda m: " " * len(m[0]), rest, flags=re.I)
    if re.search(_LINEAR, text, re.I) and not re.search(_UNSURE, text, re.I):
        values.append(Quantity("linear", Number("linear scaling", _LEAST_LINEAR, float("inf"))))
    of = {unit: [n for u, n, _ in sizes if u == unit] for unit in UNITS}
    count, base = max(map(len, of.values())), 0.0
    if count == 2 == len(sizes) and _BASE.search(text, sizes[0][2], sizes[1][2]):
        base, count, of = sizes[1][1], 1, {sizes[0][0]: [sizes[0][1]]}
    alike = {kind: [q for q in values if q.kind == kind] for kind in {q.kind: 0 for q in values}}
    series = " ".join(_words(text.partition(":")[0])) if ":" in text else ""
    for i in range(count):
        said = [qs[i] for qs in alike.values() if len(qs) == count]
        at = {unit: ns[i] for unit, ns in of.items() if len(ns) == count}
        yield replace(row, sizes=at, values=said, series=series, base=base)
    yield replace(row, values=[q for qs in alike.values() if len(qs) != count for q in qs])
