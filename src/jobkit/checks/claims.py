"""`python -m jobkit check-claims FILE`: which speed-ups and efficiencies follow from their table.

Every number is an interval, by its rounding, and so is the value recomputed from the times or rates
of the same series, relative to its smallest size: a claim follows if the two intervals meet. What
is not certain is not judged: a column of another quantity, a cell with more than one number.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, product
from typing import NamedTuple

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
_SECONDS = {"us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0}
_SECONDS |= {"min": 60.0, "minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0}
_UNIT = "|".join(sorted(_SECONDS, key=len, reverse=True))
_CELL = re.compile(
    r"(?P<value>\d[\d,.' \u00a0\u202f]*\d|\d)(?P<scale>[kMG])?"
    rf"\s?(?P<unit>x|\u00d7|%|(?:{_UNIT})s?(?![a-z]))?"
    r"(?:\s?[a-zA-Z]+\s?/\s?\w+)?(?:\s*[\[(][^\])]*[\])])?"
)
_SIZE = r"^(?:#|number of|no\. of|num)?[ _]*(?:{})s?(?: \(#\))?$"
_RULE = re.compile(r"\s*[|:+=-][\s|:+=-]*|\s*\\(?:hline|\w*rule(?:\{.*\})?)\s*")
# A head with one of these tells nothing of the scaling; else the first that is found is its role.
_OTHER = (
    r"ideal|theor|statistic|\$|expect|target|cost|loss|accura|utili|overhead|std|energy|power|memory|"
    r"batch|(?:gpu|node|core|cpu|device|rank|process)[ _-]?h|\b(?:over|vs\.?|than|relative|from)\b|"
    r"_(?:low|high)(?:_|\b)|\b(?:low|upp)er|\b(?:min|max)(?:imum)?$|\bci\b|forecast|predict"
)
_ROLES = (
    ("", r"speed[ _-]?up.*\(.*(?: - | to ).*\)"),  # of one precision over another, say
    ("gpus", _SIZE.format("gpu|rank|process|processes|device|worker|accelerator|world[ _]size")),
    ("nodes", _SIZE.format("node|machine|host")),
    ("cores", _SIZE.format("core|cpu|thread")),
    ("efficiency", r"efficien"),
    ("speed_up", r"speed[ _-]?up"),
    ("scaling", r"\bscaling\b"),
    ("rate", r"throughput|\brate\b|(?:/|\bper[ _]|_per_)\s?(?:s|sec|ms|second|min|hour|h)\b"),
    ("time", rf"time|wall|elapsed|duration|latency|\b(?:{_UNIT})s?\b"),
)
_PER_RANK = r"(?:/|per[ _-]?)\s?(?:gpu|node|rank|device|core)"
_PER_STEP = r"\b(?:it|iter\w*|steps?|batch\w*)\s?/"
_CLAIMS = {"speed_up": ("x", 1.0), "efficiency": (" %", 100.0)}  # unit, and the base's own value
_UNJUDGED = "no times or rates that are certainly its own, or not those of its base"


class Number(NamedTuple):
    """A number as it is written, and the interval of the values that would be written so."""

    text: str
    low: float
    middle: float
    high: float
    sure: bool = True  # False: of work that grew and took less time


class Column(NamedTuple):
    """The numbers of a column, in the order of the rows; None where a cell has not one alone."""

    role: str
    head: str
    words: set[str]  # of the head
    numbers: list[Number | None]


class Verdict(NamedTuple):
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
    scale, text = {"k": 1e3, "M": 1e6, "G": 1e9}.get(found["scale"], 1.0), cell.strip(" *$")
    if role == "time":
        words = [found["unit"] or "", *re.split(r"[^\w\u00b5]+|_", head.lower())[::-1]]
        units = [_SECONDS.get(w) or _SECONDS.get(w.removesuffix("s")) for w in words]
        if found["unit"] and units[0] is None:  # 1.5x, 50 %
            return None
        scale *= next(filter(None, units), 1.0)
    half, value = 10.0 ** -len(rest) / 2, float(f"{re.sub('[.,]', '', whole)}.{rest}")
    if role == "efficiency" and "%" not in head + text and value <= 3:  # a share of 1
        text, scale = f"{text} (of 1)", 100.0
    return Number(text, (value - half) * scale, value * scale, (value + half) * scale)


def check(text: str) -> list[Verdict]:
    """Every speed-up and efficiency of the tables of a text, with the lines counted from 1."""
    lines = enumerate((line[:65536] for line in text.splitlines()), 1)  # longer: an image
    rows = [(i, *_cells(line)) for i, line in lines if not _RULE.fullmatch(line)]
    blocks = groupby(rows, key=lambda row: (row[1], len(row[2])))
    return [v for (how, _), block in blocks if how for v in _judged([r[::2] for r in block])]


def _cells(line: str) -> tuple[str, list[str]]:
    """How a line divides its cells, and these."""
    line = re.sub(r"\\shortstack(?:\[\w\])?\{([^{}]*)\}", lambda m: m[1].replace("\\\\", " "), line)
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
    if re.search(_OTHER, re.sub(r"[(\[].*?[)\]]", "", head), re.I):
        return ""
    return next((role for role, words in _ROLES if re.search(words, head, re.I)), None)


def _judged(block: Sequence[tuple[int, list[str]]]) -> Iterator[Verdict]:
    """The claims of a table: the line and the cells of its heads, then of each row."""
    (_, heads), *body = block
    columns, series, counts = list[Column](), [""] * len(body), list[list[str]]()
    for head, *texts in zip(heads, *(cells for _, cells in body), strict=True):
        role = _role(head)
        if role is None:  # TF32 | 1078 img/s
            role = _role(next((t for t in texts if t[:1].isdigit()), ""))
            role = role if role in ("rate", "time") else ""
        numbers = [number(t, head, role) for t in texts]
        if role == "scaling":  # a speed-up, or an efficiency
            most = max((n.high for n in numbers if n), default=0.0)
            role = "speed_up" if most > 1.2 else "efficiency"
        if role and any(numbers):
            columns.append(Column(role, head, {*re.findall(r"[a-z]+\d*", head.lower())}, numbers))
        elif any(re.search("[a-z]", re.sub(" of ", "", t), re.I) and not number(t) for t in texts):
            filled: Iterator[str] = accumulate(texts, lambda last, t: t or last)  # empty: as above
            series = [f"{s} {t.lower()}" for s, t in zip(series, filled, strict=True)]
        else:
            counts.append(texts)
    size = next((c for unit in ("gpus", "nodes", "cores") for c in columns if c.role == unit), None)
    if size is None:
        return
    for texts in counts:  # as a batch per GPU, where it tells rows of one size apart
        places = {(s, n and n.low) for s, n in zip(series, size.numbers, strict=True)}
        if len(places) < len(series):
            series = [f"{s} {t}" for s, t in zip(series, texts, strict=True)]
    for claims, name in product([c for c in columns if c.role in _CLAIMS], dict.fromkeys(series)):
        evidence, (unit, one) = _evidence(columns, claims), _CLAIMS[claims.role]
        same = [i for i, other in enumerate(series) if other == name]
        base = min(same, key=lambda i: getattr(size.numbers[i], "low", 1e99))
        # Whether the work grew with the ranks is not said: it did in all of these rows, or in none.
        both: list[list[Verdict]] = [[], []]
        said_of = [(i, claim) for i in same if (claim := claims.numbers[i])]
        for grew, (row, claim) in product((0, 1), said_of):
            found = [n for c in evidence if (n := _reading(size, claims, c, same, row, grew))]
            said = claim.text + unit * claim.text[-1].isdigit()
            if found:  # by a time and by a rate; a value may be rounded or cut
                near = min(found, key=lambda n: abs(n.middle - claim.middle))
                low, high = claim.low, (claim.high + (claim.high - claim.low) / 2) * (1 + 1e-9)
                meets = any(low <= n.high * (1 + 1e-9) and n.low <= high for n in found)
                follows = meets if near.sure or not meets else None
                both[grew].append(Verdict(body[row][0], said, follows, near.text))
            elif row != base or not claim.low <= one <= claim.high:  # else it claims nothing
                both[grew].append(Verdict(body[row][0], said, None, _UNJUDGED))
        yield from max(both, key=lambda f: [[v.follows for v in f].count(x) for x in (True, None)])


def _evidence(columns: Sequence[Column], claim: Column) -> list[Column]:
    """The columns of times and rates that a claim is of; of several of a kind, by their heads."""
    evidence = []
    alone = [c.role for c in columns].count(claim.role) == 1
    for role in ("time", "rate"):
        own = [c for c in columns if c.role == role]
        if len(own) > 1 or not alone:
            often = Counter(word for c in own for word in c.words)
            own = [c for c in own if any(often[word] == 1 for word in c.words & claim.words)]
        evidence += own if len(own) == 1 else []
    return evidence


def _reading(
    sizes: Column, claims: Column, column: Column, same: Sequence[int], row: int, grew: int
) -> Number | None:
    """The value of a row's claim by times or rates; None without its base in the same rows."""
    unit, one = _CLAIMS[claims.role]
    pairs = ((i, sizes.numbers[i], column.numbers[i]) for i in same)
    known = {i: (n.middle, x) for i, n, x in pairs if n and x and n.low > 0 and x.low > 0}
    least = min((n for n, _ in known.values()), default=0.0)
    bases = [i for i, (n, _) in known.items() if n == least]
    if row not in known or row in bases or len(bases) > 1:
        return None
    if (own := claims.numbers[bases[0]]) and not own.low <= one <= own.high:
        return None  # relative to a run that is not in its table
    (at, this), base = known[row], known[bases[0]][1]
    up, down = (base, this) if column.role == "time" else (this, base)
    if column.role != "time" and not re.search(_PER_STEP, column.head, re.I):  # a rate of work
        grew = bool(re.search(_PER_RANK, column.head, re.I))
    grown, is_share = at / least, claims.role == "efficiency"
    factor = (grown if grew else 1.0) * (100 / grown if is_share else 1)
    low, high = factor * up.low / down.high, factor * up.high / down.low
    middle = factor * up.middle / down.middle
    how = f"{up.text} / {down.text}" + f" x {grown:g}" * grew + f" / {grown:g}" * is_share
    how += f" = {middle:.4g}{unit} [{low:.4g}, {high:.4g}]"
    return Number(how, low, middle, high, not grew or up.middle <= 1.1 * down.middle)


@command
def main(argv: Sequence[str] | None = None) -> int:
    text = "Recompute the speed-ups and efficiencies of published scaling tables."
    parser = Parser(prog="jobkit check-claims", description=text, epilog=_EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="a Markdown, LaTeX, text or CSV file")
    file = parser.parse_args(argv).file
    try:
        verdicts = check(read_text(file))
    except (OSError, UnicodeDecodeError, UsageError, csv.Error) as error:
        raise UsageError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    for v in sorted((v for v in verdicts if not v.follows), key=lambda v: v.line):
        verb = "is not judged" if v.follows is None else "does not follow"
        print(f"line {v.line}: {v.said} {verb}: {v.how}")
    judged = [v.follows for v in verdicts if v.follows is not None]
    if not judged:
        raise UsageError(f"{file}: nothing to check: no table with a claim that can be judged")
    print(f"{file}: {sum(judged)} of {len(judged)} judged claims follow")
    return Exit.OK if all(judged) else Exit.THRESHOLD
