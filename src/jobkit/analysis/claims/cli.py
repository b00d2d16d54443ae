"""`python -m jobkit check-claims FILE`: which claims about scaling follow from their table.

Recomputes speed-ups, efficiencies and rates from the sizes and times (or rates) of the table,
relative to its smallest size. A claim follows if the recomputed value, rounded to the claim's
digits, equals the claim.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jobkit.analysis.claims.tables import NUMBER, Number, Row, Table, number, prose, tables
from jobkit.errors import Exit, Parser, UsageError, command
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
_X = r"\s*[x\N{MULTIPLICATION SIGN}](?!\s*\d)"
_SIZE = r"\b(?:at|on|with|for|using)\s+(?:all\s+)?(\d+)\s*(GPUs?|nodes?|ranks?|processes)"
_LIST = re.compile(rf"({NUMBER}(?:\s*[/,]\s*{NUMBER})+){_X}", re.I)
_AT = re.compile(rf"({NUMBER}(?:\s*%|{_X}))[^.|\n]{{0,40}}?{_SIZE}", re.I)
_RATE = re.compile(rf"({NUMBER})\s*(?:samples|images)\s*(?:/\s*s|per\s+second)", re.I)
_WORK = re.compile(rf"({NUMBER})\s*(?:training\s+)?(samples|images|epochs)\b(?!\s*(?:/|per))", re.I)
_UNITS = {"speed_up": "x", "efficiency": " %", "rate": " samples/s"}
_Claim = tuple[str, str, Number | None, Table, Row]  # where, what of _UNITS, the number, its row


@dataclass(frozen=True)
class Work:
    """The amount of training in the times of a table, as far as it is known."""

    samples: float | None = None
    epochs: float | None = None
    weak: bool = False


@dataclass(frozen=True)
class Verdict:
    """One claim, the value from the table instead, and how it is computed."""

    where: str
    what: str  # of _UNITS
    said: Number
    given: float
    how: str

    @property
    def follows(self) -> bool:
        return abs(self.given - self.said.value) <= self.said.half * (1 + 1e-9)

    def line(self) -> str:
        """The claim and the computation, in one line."""
        places = max(len(self.said.text.partition(".")[2]), 2 if self.what == "speed_up" else 0)
        unit, name = _UNITS[self.what], self.what.replace("_", "-")
        claimed = f"{name} {self.said.text}{unit}"
        return f"{self.where}: {claimed} claimed; {self.how} = {self.given:,.{places}f}{unit}"


def check(text: str, work: Work = Work()) -> list[Verdict]:
    """Every claim of a text that can be recomputed. Raises UsageError where none can."""
    found, words = tables(text), prose(text)
    if not found:
        raise UsageError("no table with a column of GPUs or nodes (Markdown or CSV)")
    work = _with_stated(work, words)
    verdicts = [
        Verdict(where, what, _in_percent(said, what), *computed)
        for where, what, said, table, row in (*_in_tables(found), *_in_prose(words, found, work))
        if said and (computed := _computed(table, row, what, work))
    ]
    if not verdicts:
        raise UsageError("nothing to check: no claim beside a time or rate that it follows from")
    return verdicts


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups, efficiencies and rates of a table of scaling results."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown or CSV file")
    parser.add_argument("--samples", type=float, metavar="N", help="training samples per epoch")
    parser.add_argument("--epochs", type=float, metavar="N", help="epochs in the table's times")
    parser.add_argument("--weak", action="store_true", help="weak scaling")
    args = parser.parse_args(argv)
    try:
        content = read_text(args.file)
        verdicts = check(content, Work(args.samples, args.epochs, args.weak))
    except (OSError, UnicodeDecodeError, UsageError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{args.file}: {reason}") from None
    wrong = [v for v in verdicts if not v.follows]
    for verdict in wrong:
        print(f"does not follow: {verdict.line()}")
    print(f"{args.file}: {len(verdicts) - len(wrong)} of {len(verdicts)} claims follow")
    return Exit.THRESHOLD if wrong else Exit.OK


def _with_stated(work: Work, words: str) -> Work:
    """The work with the samples and epochs that the text gives, if it gives one value each."""
    stated: dict[str, set[float]] = {"samples": set(), "epochs": set()}
    for value, what in _WORK.findall(words):
        if found := number(value):
            stated["epochs" if what.lower() == "epochs" else "samples"].add(found.value)
    once = {k: v.pop() for k, v in stated.items() if len(v) == 1}
    samples = once.get("samples") if work.samples is None else work.samples
    return Work(samples, once.get("epochs") if work.epochs is None else work.epochs, work.weak)


def _in_tables(found: list[Table]) -> Iterator[_Claim]:
    """The claims in the cells of tables."""
    for table in found:
        for row in table.rows:
            for what in _UNITS:
                yield f"{table.name}, {table.shape(row)}", what, row.get(what), table, row


def _in_prose(words: str, found: list[Table], work: Work) -> Iterator[_Claim]:
    """The claims in the sentences around tables."""
    rows = [(table, row) for table in found for row in table.rows]
    for said, size, unit in _AT.findall(words):
        what = "efficiency" if "%" in said else "speed_up"
        role = "nodes" if unit.lower().startswith("node") else "gpus"
        for table, row in rows:
            if role in row and row[role].value == float(size):
                yield f"text, {size} {unit}", what, number(said), table, row
    for listed in _LIST.findall(words):  # with or without the smallest size
        texts = re.split(r"\s*[/,]\s*", listed)
        for table in found:
            own = table.rows if len(texts) == len(table.rows) else table.rows[1:]
            for text, row in zip(texts, own, strict=False) if len(texts) == len(own) else ():
                yield f"text, {table.shape(row)}", "speed_up", number(text), table, row
    for said in _RATE.findall(words):
        claim = number(said)
        near = [(abs(c[0] - claim.value), i) for i, c in _rates(rows, work)] if claim else []
        if near:
            yield "text, nearest row", "rate", claim, *rows[min(near)[1]]


def _rates(rows: list[tuple[Table, Row]], work: Work) -> Iterator[tuple[int, tuple[float, str]]]:
    """The rates that can be computed, with the index of their row."""
    for i, (table, row) in enumerate(rows):
        if computed := _rate(table, row, work):
            yield i, computed


def _computed(table: Table, row: Row, what: str, work: Work) -> tuple[float, str] | None:
    """The value of a claim from the table, and the formula; None where it cannot be computed."""
    if what == "rate":
        return _rate(table, row, work)
    base = table.rows[0]
    grown = table.size(row) / table.size(base)
    if "time" in row and "time" in base:
        value = base["time"].value / row["time"].value * (grown if work.weak else 1)
        how = f"{base['time'].text} / {row['time'].text}" + f" x {grown:g}" * work.weak
    elif "rate" in row and "rate" in base:
        value = row["rate"].value / base["rate"].value
        how = f"{row['rate'].text} / {base['rate'].text}"
    elif what == "efficiency" and "speed_up" in row:
        first = base["speed_up"].value if "speed_up" in base else 1.0
        value, how = row["speed_up"].value / first, f"speed-up {row['speed_up'].text}"
    else:
        return None
    if what == "speed_up":
        return value, how
    return 100 * value / grown, f"{how} / {grown:g} (relative to {table.shape(base)})"


def _rate(table: Table, row: Row, work: Work) -> tuple[float, str] | None:
    """Samples per second: samples x epochs / time."""
    samples = row["samples"].value if "samples" in row else work.samples
    epochs = row["epochs"].value if "epochs" in row else work.epochs
    epochs = 1.0 if table.per_epoch else epochs
    if "time" not in row or samples is None or epochs is None:
        return None
    how = f"{samples:,.0f} samples x {epochs:g} epochs / {row['time'].text}"
    return samples * epochs / row["time"].value, how


def _in_percent(said: Number, what: str) -> Number:
    """An efficiency in per cent, also where it was written as a share."""
    if what != "efficiency" or said.percent or said.value > 2:
        return said
    text = f"{100 * said.value:.{max(0, len(said.text.partition('.')[2]) - 2)}f}"
    return replace(said, text=text, value=100 * said.value, half=100 * said.half)
