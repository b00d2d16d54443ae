"""Tables of scaling results in Markdown or CSV: the roles of their columns, and their numbers."""

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# The meaning of a heading; the first match counts, so that "samples/s" is no number of samples.
_ROLES = (
    ("", re.compile(r"hours|cost|per[ _-]?(gpu|node|rank|device)\b|memory|ideal", re.I)),
    ("speed_up", re.compile(r"speed[ _-]?up", re.I)),
    ("efficiency", re.compile(r"efficien", re.I)),
    ("rate", re.compile(r"throughput|\brate\b|(samples|images|img)[ _]?(/|per)[ _]?s", re.I)),
    (
        "time",
        re.compile(r"time|wall|runtime|elapsed|duration|seconds|\[s\]|\(s\)|\bs ?/ ?epoch", re.I),
    ),
    ("gpus", re.compile(r"gpus?\b|ranks?\b|process|world[ _]?size|devices?\b|workers?\b", re.I)),
    ("nodes", re.compile(r"nodes?\b", re.I)),
    ("samples", re.compile(r"samples|images", re.I)),
    ("epochs", re.compile(r"epochs", re.I)),
)
_SECONDS = {"ms": 1e-3} | dict.fromkeys(("s", "sec", "second"), 1.0)
_SECONDS |= dict.fromkeys(("min", "minute"), 60.0) | dict.fromkeys(("h", "hr", "hour"), 3600.0)
_UNIT = re.compile(r"(?:^|[\s(\[_\d])(ms|s|sec|second|min|minute|h|hr|hour)s?\.?[)\]]?$", re.I)
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)$")
NUMBER = r"\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Number:
    """A number as it was written: its value, and half a unit of its last digit."""

    text: str
    value: float
    half: float
    percent: bool = False


Row = dict[str, Number]  # by role


@dataclass(frozen=True)
class Table:
    """One table: its rows, small sizes first."""

    name: str
    rows: list[Row]
    per_epoch: bool  # the times are those of one epoch

    def size(self, row: Row) -> float:
        """The row's GPUs, or its nodes in a table without GPUs; infinite where it has none."""
        return row[self._unit].value if self._unit in row else math.inf

    def shape(self, row: Row) -> str:
        """A row's size in words."""
        unit = "GPU" if self._unit == "gpus" else "node"
        return f"{self.size(row):g} {unit}{'' if self.size(row) == 1 else 's'}"

    @property
    def _unit(self) -> str:
        return "gpus" if any("gpus" in row for row in self.rows) else "nodes"


def number(text: str) -> Number | None:
    """The first number in a text: 2,840 or 1.95x or 85.2 %; "1,95" has a decimal comma."""
    match = re.search(NUMBER, text)
    if not match:
        return None
    plain = match[0]
    if re.fullmatch(r"\d+,\d+", plain) and not re.fullmatch(r"[1-9]\d{0,2},\d{3}", plain):
        plain = plain.replace(",", ".")
    plain = plain.replace(",", "")
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2])
    return Number(match[0], float(plain), half, "%" in text)


def tables(text: str) -> list[Table]:
    """Every table of a file that has a column of sizes."""
    blocks = list(_markdown(text)) or [_csv(text)]
    made = [_table(f"table {i + 1}", rows) for i, rows in enumerate(blocks) if len(rows) > 1]
    return [t for t in made if t.rows]


def prose(text: str) -> str:
    """The text of a Markdown file outside its tables; empty for CSV."""
    lines = [line for line in text.splitlines() if "|" not in line]
    return re.sub(r"[*_`]{1,2}", "", "\n".join(lines)) if any(_markdown(text)) else ""


def _markdown(text: str) -> Iterator[list[list[str]]]:
    """The cells of each Markdown table: rows of lines with |, the second one of dashes."""
    block: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if "|" in line:
            cells = line.strip().strip("|").split("|")
            block.append([re.sub(r"[*_`]{2}|`", "", c).strip() for c in cells])
            continue
        if len(block) > 1 and all(re.fullmatch(r":?-+:?", c) for c in block[1]):
            yield [block[0], *block[2:]]
        block = []


def _csv(text: str) -> list[list[str]]:
    """The cells of a CSV file; lines that begin with # are comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    delimiter = max(",;\t", key="".join(lines[:1]).count)
    found = csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)
    return [[c.strip() for c in row] for row in found]


def _table(name: str, cells: list[list[str]]) -> Table:
    heads = [
        (head, next((r for r, pattern in _ROLES if pattern.search(head)), "")) for head in cells[0]
    ]
    rows = [row for line in cells[1:] if (row := _row(heads, line)).keys() & {"gpus", "nodes"}]
    per_epoch = any(role == "time" and "epoch" in head.lower() for head, role in heads)
    table = Table(name, rows, per_epoch)
    return Table(name, sorted(rows, key=table.size), per_epoch)


def _row(heads: list[tuple[str, str]], cells: list[str]) -> Row:
    """The numbers of a row by role; of several columns of one role, the first."""
    row: Row = {}
    for (head, role), cell in zip(heads, cells, strict=False):
        found = _time(cell, head) if role == "time" else number(cell)
        if role and found and found.value > 0:
            percent = found.percent or "%" in head
            row.setdefault(role, Number(found.text, found.value, found.half, percent))
    return row


def _time(cell: str, head: str) -> Number | None:
    """A time in seconds, by the unit of its cell or else of its heading."""
    if clock := _CLOCK.search(cell):
        seconds = 3600 * int(clock[1] or 0) + 60 * int(clock[2]) + float(clock[3])
        return Number(clock[0], seconds, 0.5)
    found, unit = number(cell), _UNIT.search(cell) or _UNIT.search(head)
    factor = _SECONDS[unit[1].lower()] if unit else 1.0
    return found and Number(found.text, factor * found.value, factor * found.half)
