"""`python -m jobkit check-claims FILE`: what of a table of scaling claims follows from it.

Recomputes speed-ups, efficiencies and rates from the sizes and times (or rates) that the table
itself gives, relative to its smallest size, and lists the claims that do not follow. A claim
follows where the recomputed value, rounded to the digits of the claim, is the claim.
"""

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jobkit.analysis.claims.tables import NUMBER, Number, Table, number, prose, tables
from jobkit.errors import Exit, Parser, UsageError
from jobkit.files import read_text

_EXAMPLES = """A table has a column of sizes (GPUs or nodes) and one of times or rates; claims are
its columns named speed-up, efficiency or samples/s and, in Markdown, sentences such as
"85.2 % at 32 GPUs", "7.6x on 8 GPUs" and "1.95/3.8/7.6x".

examples:
  python -m jobkit check-claims paper.md
  python -m jobkit check-claims claims.csv --samples 16000 --epochs 10

exit codes:
  0  every claim follows from the table
  2  wrong usage: a file that cannot be read, or nothing in it to check
  4  a claim does not follow
"""
_SIZE = r"\b(?:at|on|with|for|using)\s+(?:all\s+)?(\d+)\s*(GPUs?|nodes?|ranks?|processes)"
_LIST = re.compile(
    rf"({NUMBER}(?:\s*[/,]\s*{NUMBER})+)\s*[x\N{{MULTIPLICATION SIGN}}](?!\s*\d)", re.I
)
_AT = re.compile(
    rf"({NUMBER}\s*(?:%|[x\N{{MULTIPLICATION SIGN}}](?!\s*\d)))[^.|\n]{{0,40}}?{_SIZE}", re.I
)
_RATE = re.compile(rf"({NUMBER})\s*(?:samples|images)\s*(?:/\s*s|per\s+second)", re.I)
_WORK = re.compile(rf"({NUMBER})\s*(?:training\s+)?(samples|images|epochs)\b(?!\s*(?:/|per))", re.I)
_UNIT = {"speed_up": "x", "efficiency": " %", "rate": " samples/s"}


@dataclass(frozen=True)
class Work:
    """What was trained in the time that a table gives, as far as it is known."""

    samples: float | None = None
    epochs: float | None = None
    weak: bool = False


@dataclass(frozen=True)
class Verdict:
    """One claim, what the table gives instead, and by which sum."""

    where: str
    what: str  # speed_up, efficiency or rate
    said: Number
    given: float
    how: str

    @property
    def follows(self) -> bool:
        return abs(self.given - self.said.value) <= self.said.half * (1 + 1e-9)

    def line(self) -> str:
        """The claim and the sum, in one line."""
        places = max(len(self.said.text.partition(".")[2]), 2 if self.what == "speed_up" else 0)
        unit, name = _UNIT[self.what], self.what.replace("_", "-")
        claimed = f"{name} {self.said.text}{unit}" if unit.strip() else self.said.text
        return f"{self.where}: {claimed} claimed; {self.how} = {self.given:,.{places}f}{unit}"


def check(text: str, work: Work = Work()) -> list[Verdict]:
    """Every claim of a file's text that can be recomputed. Raises UsageError where none can."""
    found = tables(text)
    if not found:
        raise UsageError("no table with a column of GPUs or nodes (Markdown or CSV)")
    words = prose(text)
    work = _with_stated(work, words)
    verdicts = [v for table in found for v in _of_table(table, work)]
    verdicts += _of_prose(words, found, work)
    if not verdicts:
        raise UsageError("nothing to check: no claim beside a time or rate that it follows from")
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups, efficiencies and rates of a table of scaling claims."
    parser = Parser(prog="python -m jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown or CSV file")
    parser.add_argument("--samples", type=float, metavar="N", help="training samples of an epoch")
    parser.add_argument("--epochs", type=float, metavar="N", help="epochs in the time of the table")
    parser.add_argument("--weak", action="store_true", help="the work grows with the size")
    args = parser.parse_args(argv)
    try:
        content = read_text(args.file)
        verdicts = check(content, Work(args.samples, args.epochs, args.weak))
    except (OSError, UnicodeDecodeError, UsageError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"jobkit: error: {args.file}: {reason}", file=sys.stderr)
        return Exit.USAGE
    wrong = [v for v in verdicts if not v.follows]
    for verdict in wrong:
        print(f"does not follow: {verdict.line()}")
    print(f"{args.file}: {len(verdicts) - len(wrong)} of {len(verdicts)} claims follow")
    return Exit.THRESHOLD if wrong else Exit.OK


def _with_stated(work: Work, words: str) -> Work:
    """The samples and epochs that the text states once and for all, where no option says them."""
    stated: dict[str, set[float]] = {"samples": set(), "epochs": set()}
    for value, what in _WORK.findall(words):
        if found := number(value):
            stated["epochs" if what.lower() == "epochs" else "samples"].add(found.value)
    once = {k: v.pop() for k, v in stated.items() if len(v) == 1}
    samples = once.get("samples") if work.samples is None else work.samples
    epochs = once.get("epochs") if work.epochs is None else work.epochs
    return Work(samples, epochs, work.weak)


def _of_table(table: Table, work: Work) -> Iterator[Verdict]:
    """The claims in the cells of a table."""
    for row in sorted(table.rows, key=lambda r: _size(table, r)):
        for what in ("speed_up", "efficiency", "rate"):
            if what in row and (sum_ := _computed(table, row, what, work)):
                where = f"{table.name}, {_shape(table, row)}"
                yield Verdict(where, what, _scaled(row[what], what), *sum_)


def _of_prose(words: str, found: list[Table], work: Work) -> Iterator[Verdict]:
    """The claims in the sentences around the tables."""
    for said, size, unit in _AT.findall(words):
        claim = number(said)
        what = "efficiency" if "%" in said else "speed_up"
        role = "nodes" if unit.lower().startswith("node") else "gpus"
        for table, row in _rows(found, role, float(size)):
            if claim and (sum_ := _computed(table, row, what, work)):
                yield Verdict(f"text, {size} {unit}", what, _scaled(claim, what), *sum_)
    for said in _LIST.findall(words):
        yield from _of_list(re.split(r"\s*[/,]\s*", said), found, work)
    for said in _RATE.findall(words):
        given = [s for t in found for r in t.rows if (s := _computed(t, r, "rate", work))]
        if given and (claim := number(said)):
            nearest = min(given, key=lambda s: abs(s[0] - claim.value))
            yield Verdict("text, nearest row", "rate", claim, *nearest)


def _of_list(said: list[str], found: list[Table], work: Work) -> Iterator[Verdict]:
    """Speed-ups in a row, as 1.95/3.8/7.6x: those of the sizes, with or without the smallest."""
    for table in found:
        rows = sorted(table.rows, key=lambda r: _size(table, r))
        rows = rows if len(said) == len(rows) else rows[1:]
        for text, row in zip(said, rows, strict=False) if len(said) == len(rows) else ():
            claim, sum_ = number(text), _computed(table, row, "speed_up", work)
            if claim and sum_:
                where = f"text, {_shape(table, row)}"
                yield Verdict(where, "speed_up", claim, *sum_)


def _computed(
    table: Table, row: dict[str, Number], what: str, work: Work
) -> tuple[float, str] | None:
    """What the table gives for a claim, and the sum; None where it gives nothing."""
    if what == "rate":
        return _rate(table, row, work)
    base = min(table.rows, key=lambda r: _size(table, r))
    grown = _size(table, row) / _size(table, base)
    if {"time"} <= row.keys() & base.keys():
        value = base["time"].value / row["time"].value * (grown if work.weak else 1)
        how = f"{base['time'].text} / {row['time'].text}"
        how += f" x {grown:g}" if work.weak else ""
    elif {"rate"} <= row.keys() & base.keys():
        value = row["rate"].value / base["rate"].value
        how = f"{row['rate'].text} / {base['rate'].text}"
    elif what == "efficiency" and "speed_up" in row:
        first = base["speed_up"].value if "speed_up" in base else 1.0
        value, how = row["speed_up"].value / first, f"speed-up {row['speed_up'].text}"
    else:
        return None
    if what == "speed_up":
        return value, how
    relative = f"relative to {_shape(table, base)}"
    return 100 * value / grown, f"{how} / {grown:g} ({relative})"


def _rate(table: Table, row: dict[str, Number], work: Work) -> tuple[float, str] | None:
    """Samples a second: samples x epochs / time."""
    own = {k: row[k].value if k in row else getattr(work, k) for k in ("samples", "epochs")}
    if table.per_epoch:
        own["epochs"] = 1.0
    if "time" not in row or own["samples"] is None or own["epochs"] is None:
        return None
    value = own["samples"] * own["epochs"] / row["time"].value
    how = f"{own['samples']:,.0f} samples x {own['epochs']:g} epochs / {row['time'].text}"
    return value, how


def _scaled(said: Number, what: str) -> Number:
    """An efficiency in per cent, also where it was written as a share."""
    if what != "efficiency" or said.percent or said.value > 2:
        return said
    text = f"{100 * said.value:.{max(0, len(said.text.partition('.')[2]) - 2)}f}"
    return replace(said, text=text, value=100 * said.value, half=100 * said.half)


def _rows(found: list[Table], role: str, size: float) -> Iterator[tuple[Table, dict[str, Number]]]:
    """The rows of that size, in the tables that count in that unit."""
    for table in found:
        for row in table.rows:
            if role in row and row[role].value == size:
                yield table, row


def _size(table: Table, row: dict[str, Number]) -> float:
    return row[table.size].value if table.size in row else float("inf")


def _shape(table: Table, row: dict[str, Number]) -> str:
    """A row's size in words."""
    size, unit = _size(table, row), "GPU" if table.size == "gpus" else "node"
    return f"{size:g} {unit}{'' if size == 1 else 's'}"
