"""`python -m jobkit check-claims FILE`: which speed-ups and efficiencies follow from their table.

Every number is an interval, by its rounding, and so is the value recomputed from the times or rates
of the same series, relative to its smallest size: a claim follows if the two intervals meet. What
is not certain is not judged: a column of another quantity, a cell with more than one number.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
_NUMBER = r"\d[\d,.' \u00a0\u202f]*\d|\d"
_SECONDS = {"us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0}
_SECONDS |= {"min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0}
_UNIT = "|".join(sorted(_SECONDS, key=len, reverse=True))
_CELL = re.compile(
    rf"(?P<value>{_NUMBER})(?P<scale>[kMG])?\s?(?P<unit>x|\u00d7|%|(?:{_UNIT})s?(?![a-z]))?"
    r"(?:\s?[a-zA-Z]+\s?/\s?\w+)?(?:\s*[\[(][^\])]*[\])])?"
)
_SCALES = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_SIZE = r"^(?:#|number of|no\. of|num)?[ _]*(?:{})s?(?: \(#\))?$"
_PER_S = r"(?:/|\bper[ _]|_per_)\s?(?:s|sec|ms|second|min|hour|h)\b"
# A head with one of these tells nothing of the scaling; else the first that is found is its role.
_OTHER = (
    r"ideal|theor|statistic|\$|expect|target|cost|loss|accura|utili|overhead|std|energy|power|memory|"
    r"batch|(?:gpu|node|core|cpu|device|rank|process)[ _-]?h|\b(?:over|vs\.?|than|relative|from)\b|"
    r"_(?:low|high)(?:_|\b)|\b(?:low|upp)er|\b(?:min|max)(?:imum)?$|\bci\b|forecast|predict"
)
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
_OF_TWO = r"speed[ _-]?up.*\(.*(?: - | to ).*\)"  # of one precision over another, say
_PER_RANK = r"(?:/|per[ _-]?)\s?(?:gpu|node|rank|device|core)"
_PER_STEP = r"\b(?:it|iter\w*|steps?|batch\w*)\s?/"
_UNITS = {"speed_up": "x", "efficiency": " %"}
_ONE = {"speed_up": 1.0, "efficiency": 100.0}


@dataclass(frozen=True)
class Number:
    """A number as it is written, and the interval of the values that would be written so."""

    text: str
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Column:
    """The numbers of a column, in the order of the rows; None where a cell has not one alone."""

    role: str
    head: str
    numbers: list[Number | None]


@dataclass(frozen=True)
class Verdict:
    """A claim as it is written, whether it follows (None: not judged), and by what, or why not."""

    line: int
    said: str
    follows: bool | None
    how: str


def number(cell: str, head: str = "", role: str = "") -> Number | None:
    """The one number of a cell: 2,840 or 1.95x, 85 %, 12 min; a time in seconds."""
    found = _CELL.fullmatch(cell.strip(" *$~"))
    if not found:
        return None
    whole, rest = re.sub(r"[' \u00a0\u202f]", "", found["value"]), ""
    marks = re.findall(r"[.,]", whole)
    of_thousands = re.fullmatch(r"[1-9]\d{0,2},\d{3}", whole)
    if marks and not of_thousands and (len(marks) == 1 or len({*marks}) > 1):
        whole, _, rest = whole.rpartition(marks[-1])
    scale, text = _SCALES[found["scale"]], cell.strip(" *$")
    if role == "time":
        words = [found["unit"] or "", *re.split(r"[^\w\u00b5]+|_", head.lower())[::-1]]
        units = [_SECONDS.get(w) or _SECONDS.get(w.removesuffix("s")) for w in words]
        if found["unit"] and units[0] is None:  # 1.5x, 50 %
            return None
        scale *= next(filter(None, units), 1.0)
    half, value = 10.0 ** -len(rest) / 2, float(f"{re.sub('[.,]', '', whole)}.{rest}")
    if role == "efficiency" and "%" not in head + text and value <= 3:  # a share of 1
        text, scale = f"{text} (of 1)", 100.0
    return Number(text, (value - half) * scale, (value + half) * scale)


def check(text: str) -> list[Verdict]:
    """Every speed-up and efficiency of the tables of a text, with the lines counted from 1."""
    verdicts, block, way = list[Verdict](), list[tuple[int, list[str]]](), ""
    for i, line in enumerate([*text.splitlines(), ""], 1):
        how, cells = _cells(line, way)
        if block and (how != way or (cells and len(cells) != len(block[0][1]))):
            verdicts += _judged(block)
            block = []
        way = how
        if cells:
            block.append((i, cells))
    return verdicts


def _cells(line: str, way: str) -> tuple[str, list[str]]:
    """How a line divides its cells, and these; a rule goes on with the table above."""
    if re.fullmatch(r"[\s|:+=-]+|\s*\\(?:hline|\w*rule(?:\{.*\})?)\s*", line) and line.strip():
        return way, []
    stacked = r"\\shortstack(?:\[\w\])?\{([^{}]*)\}"  # a head of several lines
    line = re.sub(stacked, lambda head: head[1].replace("\\\\", " "), line)
    if re.search(r"(?<!\\)&", line) and "\\\\" in line:
        plain = re.sub(r"\\(?:text\w\w|mathbf|hline|\w*rule)\b|\\\\.*|[{}$]", "", line)
        cells = re.split(r"(?<!\\)&", plain.replace("\\times", "x"))
        return "&", [re.sub(r"\\([%_#&])", r"\1", c).replace("\\", "").strip() for c in cells]
    if line.count("|") > 1:
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        return "|", [re.sub(r"\*\*|`|<[^>]*>|\\(?=\W)", "", c).strip() for c in cells]
    for mark in ("\t", ";", ","):
        if line.count(mark) and not re.search(rf"{mark} \w+ \w+ ", line):
            try:
                return mark, [c.strip() for c in next(csv.reader([line], delimiter=mark))]
            except csv.Error:  # a field of more characters than a cell has
                return "", []
    cells = re.split(r"\s{2,}", line.strip())
    return ("  ", cells) if len(cells) > 1 else ("", [])


def _role(head: str) -> str | None:
    bare = re.sub(r"[(\[].*?[)\]]", "", head)
    if re.search(_OTHER, bare, re.I) or re.search(_OF_TWO, head, re.I):
        return ""
    return next((role for role, words in _ROLES if re.search(words, head, re.I)), None)


def _judged(block: Sequence[tuple[int, list[str]]]) -> Iterator[Verdict]:
    """The claims of a table: the line and the cells of its heads, then of each row."""
    (_, heads), *body = block
    columns, series, counts = list[Column](), [""] * len(body), list[list[str]]()
    for i, head in enumerate(heads):
        texts = [cells[i] for _, cells in body]
        role = _role(head)
        if role is None:  # TF32 | 1078 img/s
            role = _role(next((t for t in texts if t[:1].isdigit()), ""))
            role = role if role in ("rate", "time") else ""
        numbers = [number(t, head, role) for t in texts]
        if role == "scaling":  # a speed-up, or an efficiency
            most = max((n.high for n in numbers if n), default=0.0)
            role = "speed_up" if most > 1.2 else "efficiency"
        if role and any(numbers):
            columns.append(Column(role, head, numbers))
        elif any(re.search("[a-z]", t, re.I) and not number(t) for t in texts):
            last = ""
            for row, text in enumerate(texts):
                last = text.lower() or last
                series[row] += f" {last}"
        else:
            counts.append(texts)
    size = next((c for unit in ("gpus", "nodes", "cores") for c in columns if c.role == unit), None)
    if size is None:
        return
    for texts in counts:  # as a batch per GPU, where it tells rows of one size apart
        places = [(s, n and n.low) for s, n in zip(series, size.numbers, strict=True)]
        if len({*places}) < len(places):
            series = [f"{s} {t}" for s, t in zip(series, texts, strict=True)]
    for claims in (column for column in columns if column.role in _UNITS):
        evidence = _evidence(columns, claims)
        for row, claim in enumerate(claims.numbers):
            if claim is None:
                continue
            same = [i for i, name in enumerate(series) if name == series[row]]
            found, why = list[Number](), "no times or rates that are certainly its own"
            for column in evidence:
                readings, why = _readings(size, claims, column, same, row)
                found += readings
            said = claim.text + _UNITS[claims.role] * claim.text[-1].isdigit()
            if found:  # of two readings the one that the claim is nearest to
                near = min(found, key=lambda n: abs(n.middle - claim.middle))
                high = claim.high + (claim.high - claim.low) / 2  # a value may be rounded or cut
                low = claim.low * (1 - 1e-9)
                meets = any(low <= n.high and n.low <= high * (1 + 1e-9) for n in found)
                yield Verdict(body[row][0], said, meets, near.text)
            elif why:  # else it is the base itself, which claims nothing
                yield Verdict(body[row][0], said, None, why)


def _evidence(columns: Sequence[Column], claim: Column) -> list[Column]:
    """The columns of times and rates that a claim is of; of several of a kind, by their heads."""

    def words(column: Column) -> set[str]:
        return {*re.findall(r"[a-z]+\d*", column.head.lower())}

    evidence = []
    alone = sum(c.role == claim.role for c in columns) == 1
    for role in ("time", "rate"):
        own = [c for c in columns if c.role == role]
        if len(own) > 1 or not alone:
            others = [[words(o) for o in own if o is not c] for c in own]
            pairs = zip(own, others, strict=True)
            own = [c for c, rest in pairs if words(c).difference(*rest) & words(claim)]
        evidence += own if len(own) == 1 else []
    return evidence


def _readings(
    sizes: Column, claims: Column, column: Column, same: Sequence[int], row: int
) -> tuple[list[Number], str]:
    """The values of a row's claim by a column of times or rates; else why there are none.

    same: the rows of its series. Neither for the base itself.
    """
    kind, known = claims.role, dict[int, tuple[float, Number | None, Number]]()
    for i in same:
        n, x = sizes.numbers[i], column.numbers[i]
        if n and x and x.low > 0:
            known[i] = n.middle, claims.numbers[i], x
    least = min((n for n, _, _ in known.values()), default=0.0)
    if row not in known or least <= 0:
        return [], "no size with a time or a rate beside it"
    bases = [(c, x) for n, c, x in known.values() if n == least]
    strange = any(c and not c.low <= _ONE[kind] <= c.high for c, _ in bases)
    if strange or len(bases) == len(known):
        return [], "relative to a run that is not in its table"
    at, _, this = known[row]
    if at == least:
        return [], ""
    one = Number(bases[0][1].text, min(x.low for _, x in bases), max(x.high for _, x in bases))
    up, down = (one, this) if column.role == "time" else (this, one)
    # Whether the work grew with the ranks: a time or a rate of steps may be of strong or of weak
    # scaling, and a right claim meets one of the two.
    either = column.role == "time" or re.search(_PER_STEP, column.head, re.I)
    grows = (False, True) if either else (bool(re.search(_PER_RANK, column.head, re.I)),)
    readings, grown = [], at / least
    for more in grows:
        factor = (grown if more else 1.0) * (100 / grown if kind == "efficiency" else 1)
        low, high = factor * up.low / down.high, factor * up.high / down.low
        how = f"{up.text} / {down.text}" + f" x {grown:g}" * more
        how += f" / {grown:g}" * (kind == "efficiency")
        how += f" = {(low + high) / 2:.4g}{_UNITS[kind]} [{low:.4g}, {high:.4g}]"
        readings.append(Number(how, low, high))
    return readings, ""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check a file of claims; return the exit code."""
    text = "Recompute the speed-ups and efficiencies of published scaling tables."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown, LaTeX, text or CSV file")
    file = parser.parse_args(argv).file
    try:
        verdicts = check(read_text(file))
    except (OSError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    for v in verdicts:
        if not v.follows:
            verb = "is not judged" if v.follows is None else "does not follow"
            print(f"line {v.line}: {v.said} {verb}: {v.how}")
    judged = [v.follows for v in verdicts if v.follows is not None]
    if not judged:
        raise UsageError(f"{file}: nothing to check: no table with a claim that can be judged")
    print(f"{file}: {sum(judged)} of {len(judged)} judged claims follow")
    return Exit.OK if all(judged) else Exit.THRESHOLD
