"""Tables of somebody's scaling results, as Markdown or CSV: the roles of columns, the numbers."""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# What a heading is about; the first that fits counts, so that "samples/s" is no number of samples.
_ROLES = (
    ("", re.compile(r"hours|cost|per[ _-]?(gpu|node|rank|device)\b|memory|ideal", re.I)),
    ("speed_up", re.compile(r"speed[ _-]?up", re.I)),
    ("efficiency", re.compile(r"efficien", re.I)),
    ("rate", re.compile(r"throughput|\brate\b|(samples|images|img)[ _]?(/|per)[ _]?s", re.I)),
    ("time", re.compile(r"time|wall|runtime|elapsed|duration|seconds|\[s\]|\(s\)", re.I)),
    ("gpus", re.compile(r"gpus?\b|ranks?\b|process|world[ _]?size|devices?\b|workers?\b", re.I)),
    ("nodes", re.compile(r"nodes?\b", re.I)),
    ("samples", re.compile(r"samples|images", re.I)),
    ("epochs", re.compile(r"epochs", re.I)),
)
_UNITS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0}
_UNITS |= {"hr": 3600.0, "hour": 3600.0, "ms": 1e-3}
_UNIT = re.compile(r"(?:^|[\s(\[_\d])(ms|s|sec|second|min|minute|h|hr|hour)s?\.?[)\]]?$", re.I)
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)$")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
_NUMBER = re.compile(NUMBER)


@dataclass(frozen=True)
class Number:
    """A number as it was written: its value, and half a unit of its last digit."""

    text: str
    value: float
    half: float
    percent: bool = False


@dataclass
class Table:
    """One table: by role of its columns, the numbers of each row."""

    name: str
    rows: list[dict[str, Number]] = field(default_factory=list)
    per_epoch: bool = False  # the times are those of one epoch

    @property
    def size(self) -> str:
        """What its sizes are counted in: gpus where it says them, else nodes."""
        return "gpus" if any("gpus" in row for row in self.rows) else "nodes"


def number(text: str) -> Number | None:
    """The first number in a text: 2,840 or 1.95x or 85.2 %; a comma before other than three
    digits is a decimal one."""
    match = _NUMBER.search(text)
    if not match:
        return None
    plain = match[0]
    if re.fullmatch(r"\d+,\d+", plain) and not re.fullmatch(r"[1-9]\d{0,2},\d{3}", plain):
        plain = plain.replace(",", ".")
    plain = plain.replace(",", "")
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2])
    return Number(match[0], float(plain), half, "%" in text)


def tables(text: str) -> list[Table]:
    """Every table of a file that has columns which say something of scaling."""
    blocks = list(_markdown(text)) or [_csv(text)]
    made = [_table(f"table {i + 1}", rows) for i, rows in enumerate(blocks) if len(rows) > 1]
    return [t for t in made if t.rows]


def prose(text: str) -> str:
    """What of a Markdown file stands outside its tables."""
    lines = [line for line in text.splitlines() if "|" not in line]
    return re.sub(r"[*_`]{1,2}", "", "\n".join(lines)) if len(list(_markdown(text))) else ""


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
    """The cells of a CSV file; lines that begin with # are remarks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    head = lines[0] if lines else ""
    delimiter = max(",;\t", key=head.count)
    return [
        [c.strip() for c in row]
        for row in csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)
    ]


def _table(name: str, cells: list[list[str]]) -> Table:
    heads, made = cells[0], Table(name)
    roles = [_role(head) for head in heads]
    made.per_epoch = any(
        role == "time" and re.search(r"epoch", head, re.I)
        for role, head in zip(roles, heads, strict=True)
    )
    for row in cells[1:]:
        found: dict[str, Number] = {}
        for head, role, cell in zip(heads, roles, row, strict=False):
            value = _time(cell, head) if role == "time" else number(cell)
            if role and value and value.value > 0 and role not in found:
                percent = value.percent or "%" in head
                found[role] = Number(value.text, value.value, value.half, percent)
        if found.keys() & {"gpus", "nodes"}:
            made.rows.append(found)
    return made


def _role(head: str) -> str:
    return next((role for role, pattern in _ROLES if pattern.search(head)), "")


def _time(cell: str, head: str) -> Number | None:
    """A time in seconds, by the unit of its cell or else of its heading."""
    if clock := _CLOCK.search(cell):
        seconds = 3600 * int(clock[1] or 0) + 60 * int(clock[2]) + float(clock[3])
        return Number(clock[0], seconds, 0.5)
    found, unit = number(cell), _UNIT.search(cell) or _UNIT.search(head)
    if not found:
        return None
    factor = _UNITS[unit[1].lower()] if unit else 1.0
    return Number(found.text, factor * found.value, factor * found.half)
