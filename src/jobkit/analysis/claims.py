"""`python -m jobkit check-claims FILE`: which speed-ups and efficiencies follow from their table.

Every number is an interval, by its rounding, and so is the value recomputed from the times or rates
of the same series, relative to its smallest size: a claim follows if the two intervals meet.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jobkit.analysis.claim_tables import SIZES, Column, Number, Table, tables_of
from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.files import read_text

_EXAMPLES = """Judged are speed-ups and efficiencies in tables (Markdown, CSV, LaTeX, aligned text)
with the size and a time or a rate beside them. What is not certain is not judged, and listed.

examples:
  python -m jobkit check-claims paper.md
  python -m jobkit check-claims logs/demo/scaling.tex

exit codes:
  0  every claim that could be judged follows
  2  wrong usage: a file that cannot be read, or no claim in it that can be judged
  4  a claim does not follow
"""
_UNITS = {"speed_up": "x", "efficiency": " %"}
_PER_RANK = r"(?:/|per[ _-]?)\s?(?:gpu|node|rank|device|core)"
_FLAT = 0.75  # of the base's time: on more ranks it is of weak scaling, where nothing says
_ONE = {"speed_up": 1.0, "efficiency": 100.0}


@dataclass(frozen=True)
class Verdict:
    """One claim, whether it follows (None: not judged), and how it was computed, or why not."""

    line: int
    kind: str
    number: Number
    follows: bool | None
    how: str

    @property
    def said(self) -> str:
        """The claim as it is written."""
        text = self.number.text
        return text + _UNITS[self.kind] if text[-1].isdigit() else text


def check(text: str, weak: bool = False) -> list[Verdict]:
    """Every speed-up and efficiency of the tables of a text."""
    return [verdict for table in tables_of(text) for verdict in _judged(table, weak)]


def _judged(table: Table, weak: bool) -> Iterator[Verdict]:
    size = next(c for unit in SIZES for c in table.columns if c.role == unit)
    for column in table.columns:
        if column.role not in _UNITS:
            continue
        column = _in_percent(column) if column.role == "efficiency" else column
        evidence = _evidence(table, column)
        for row, claim in enumerate(column.numbers):
            if claim is None:
                continue
            said = re.findall(r"\b(weak|strong)\b", f"{table.context} {table.series[row]}")
            scaling = "weak" if weak else said[-1] if said else ""
            found, why = [], "no times or rates that are certainly its own"
            for one in evidence:
                made, why = _readings(table, size, column, one, row, scaling)
                found += made
            if found or why:  # else it is the base itself, which claims nothing
                follows = any(_meet(claim, one) for one in found) if found else None
                # Of two readings the one that the claim is nearest to.
                near = min(found, key=lambda n: abs(_middle(n) - _middle(claim)), default=None)
                how = near.text if near else why
                yield Verdict(table.lines[row], column.role, claim, follows, how)


def _evidence(table: Table, claim: Column) -> list[Column]:
    """The columns of times and rates that a claim is of; of several of a kind, by their heads."""
    made = []
    same = sum(c.role == claim.role for c in table.columns)
    for role in ("time", "rate"):
        own = [c for c in table.columns if c.role == role]
        words = [{*re.findall(r"[a-z]+\d*", c.head.lower())} for c in own]
        if len(own) > 1 or same > 1:
            others = [set[str]().union(*words[:i], *words[i + 1 :]) for i in range(len(own))]
            said = {*re.findall(r"[a-z]+\d*", claim.head.lower())}
            alone = zip(own, words, others, strict=True)
            own = [c for c, mine, rest in alone if (mine - rest) & said]
        made += own if len(own) == 1 else []
    return made


def _readings(
    table: Table, size: Column, claims: Column, column: Column, row: int, scaling: str
) -> tuple[list[Number], str]:
    """The values of a claim by a column of times or rates; else why there are none.

    Neither of them for the base itself.
    """
    kind, at, this = claims.role, size.numbers[row], column.numbers[row]
    if at is None or this is None or this.low <= 0:
        return [], "no size with a time or a rate beside it"
    rows = [i for i, s in enumerate(table.series) if s == table.series[row]]
    sizes = {i: _middle(n) for i in rows if (n := size.numbers[i]) and _low(column.numbers[i]) > 0}
    least = min(sizes.values())
    if least <= 0:
        return [], "no size with a time or a rate beside it"
    bases = [i for i in sizes if sizes[i] == least]
    said = [claim for i in bases if (claim := claims.numbers[i])]
    if any(not one.low <= _ONE[kind] <= one.high for one in said) or len({*sizes.values()}) < 2:
        return [], "relative to a run that is not in its table"
    if row in bases:
        return [], ""
    ones = [n for i in bases if (n := column.numbers[i])]
    one = Number(ones[0].text, min(n.low for n in ones), max(n.high for n in ones))
    grown, is_time = _middle(at) / least, column.role == "time"
    up, down = (one, this) if is_time else (this, one)
    scaled = {scaling == "weak"} if is_time else {bool(re.search(_PER_RANK, column.head, re.I))}
    # A step of strong or of weak scaling; an epoch of the same data or of data that grew; a time
    # that does not fall as the ranks grow.
    unclear = {"": r"step|iter|batch", "weak": "epoch"}.get(scaling)
    if is_time and unclear and re.search(unclear, column.head, re.I):
        scaled = {False, True}
    flat = is_time and not scaling and _middle(this) > _FLAT * _middle(one)
    per_step = not is_time and re.search(r"\b(?:it|iter\w*|steps?|batch\w*)\s?/", column.head, re.I)
    if flat or (per_step and scaling != "strong"):
        scaled = {False, True}
    made = []
    for more in sorted(scaled):
        factor = (grown if more else 1.0) * (100 / grown if kind == "efficiency" else 1)
        low, high = factor * up.low / down.high, factor * up.high / down.low
        how = f"{up.text} / {down.text}" + f" x {grown:g}" * more
        how += f" / {grown:g}" * (kind == "efficiency")
        how += f" = {(low + high) / 2:.4g}{_UNITS[kind]} [{low:.4g}, {high:.4g}]"
        made.append(Number(how, low, high))
    return made, ""


def _in_percent(column: Column) -> Column:
    """Efficiencies in per cent, which some tables, or some of their rows, have as shares."""
    known = [n for n in column.numbers if n]
    marked = any("%" in n.text for n in known)
    if "%" in column.head or (not marked and max((n.high for n in known), default=0.0) > 3):
        return column
    return replace(
        column,
        numbers=[
            Number(f"{n.text} (of 1)", 100 * n.low, 100 * n.high)
            if n and "%" not in n.text and n.high <= 3
            else n
            for n in column.numbers
        ],
    )


def _meet(claim: Number, reading: Number) -> bool:
    """Whether a reading could be written as the claim, rounded or cut."""
    high = claim.high + (claim.high - claim.low) / 2
    return claim.low * (1 - 1e-9) <= reading.high and reading.low <= high * (1 + 1e-9)


def _low(one: Number | None) -> float:
    return one.low if one else 0.0


def _middle(one: Number | None) -> float:
    return (one.low + one.high) / 2 if one else 0.0


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups and efficiencies of published scaling tables."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown, LaTeX, text or CSV file")
    parser.add_argument("--weak", action="store_true", help="weak scaling, whatever headings say")
    args = parser.parse_args(argv)
    try:
        verdicts = check(read_text(args.file), args.weak)
    except (OSError, UnicodeDecodeError, UsageError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{args.file}: {reason}") from None
    judged = [v for v in verdicts if v.follows is not None]
    wrong = [v for v in judged if not v.follows]
    for v in wrong:
        print(f"line {v.line}: {v.said} does not follow: {v.how}")
    if judged:
        print(f"{args.file}: {len(judged) - len(wrong)} of {len(judged)} judged claims follow")
    unjudged: dict[str, list[Verdict]] = {}
    for v in verdicts:
        if v.follows is None:
            unjudged.setdefault(v.how, []).append(v)
    for why, own in unjudged.items():
        print(f"not judged, {why}: {', '.join(f'{v.said} (line {v.line})' for v in own)}")
    if not judged:
        raise UsageError(f"{args.file}: nothing to check: no table with a claim that can be judged")
    return Exit.THRESHOLD if wrong else Exit.OK
