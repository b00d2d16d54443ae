"""Numbers as they are written: an interval, by their rounding, and what they are of."""

import re
from dataclasses import dataclass

_DIGITS = r"\d{1,3}(?:[ '\u00a0\u202f]\d{3})+(?!\d)(?:[.,]\d+)?"
_DIGITS += r"|\d{1,3}(?:[.,]\d{3})+(?!\d)(?:[.,]\d+)?|\d+(?:[.,]\d+)?"
NUMBER = rf"(?<![\w.,])(?:{_DIGITS})(?:e[+-]?\d+)?(?:[ ]?[kMG](?![A-Za-z]))?"
_BOUND = r"(?:(?P<bound>[<>\u2264\u2265]|~|\u2248|up to|at least|at most|about|over|under)\s*)?"
WRITTEN = rf"{_BOUND}(?P<low>{NUMBER})(?:\s*(?:-|\u2013|to)\s*(?P<high>{NUMBER}))?"
WRITTEN += rf"(?:\s*(?:\u00b1|\+/-)\s*(?P<error>{NUMBER}))?"
_READ = re.compile(WRITTEN, re.I)
SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3}
SECONDS |= dict.fromkeys(("s", "sec", "second"), 1.0) | dict.fromkeys(("m", "min", "minute"), 60.0)
SECONDS |= dict.fromkeys(("h", "hr", "hour"), 3600.0) | {"d": 86400.0, "day": 86400.0}
UNIT = rf"(?:{'|'.join(sorted(SECONDS, key=len, reverse=True))})s?\b"
_TIMES = re.compile(rf"({WRITTEN})\s*({UNIT})", re.I)
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)\b")
_SCALE = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Number:
    """A number and the interval of the values that would be written so."""

    text: str
    low: float
    high: float

    def times(self, factor: float) -> "Number":
        """The number in another unit."""
        return Number(self.text, self.low * factor, self.high * factor)


def number(text: str) -> Number | None:
    """The first number: 2,840 or 2 840, 1.234,5, 1.8M, 1e5, ~70, >3.5, 2-3 or 99.1 +/- 0.4."""
    found = _READ.search(text)
    if not found or re.search(r"e[+-]?\d{3}", found[0], re.I):  # 1e999 is beyond what a float holds
        return None
    bound = (found["bound"] or "").lower()
    value, half = _value(found["low"], bound in ("~", "\u2248", "about"))
    low, high = value - half, value + half
    if found["high"]:
        high = sum(_value(found["high"]))
    if found["error"]:
        low, high = value - _value(found["error"])[0], value + _value(found["error"])[0]
    if bound in (">", "\u2265", "at least", "over"):
        high = float("inf")
    elif bound in ("<", "\u2264", "at most", "under", "up to"):
        low = 0.0
    return Number(found[0].strip(), low, high)


def seconds(text: str, head: str = "") -> Number | None:
    """A time: 900 us, 1:20:30, 1 h 20 min; without a unit of its own, in that of its heading."""
    if clock := _CLOCK.search(text):
        value = 3600 * int(clock[1] or 0) + 60 * int(clock[2]) + float(clock[3])
        return Number(clock[0], value - 0.5, value + 0.5)
    parts = [(number(m[1]), SECONDS[_singular(m[m.lastindex or 0])]) for m in _TIMES.finditer(text)]
    if scaled := [n.times(unit) for n, unit in parts if n]:
        end = scaled[-1]  # the digits of 1 h 20 min are those of the minutes
        rest = sum((n.low + n.high) / 2 for n in scaled[:-1])
        return Number(text.strip(), rest + end.low, rest + end.high)
    units = [u for u in re.split(r"[^\w\u00b5]+|_", head.lower()) if _singular(u) in SECONDS]
    found = number(text)
    return found.times(SECONDS[_singular(units[-1])] if units else 1.0) if found else None


def _singular(unit: str) -> str:
    unit = unit.lower()
    return unit if unit in SECONDS else unit.removesuffix("s")


def _value(text: str, about: bool = False) -> tuple[float, float]:
    """A number, and half a unit of its last digit; "about 70" is known to its 7 only."""
    parts = re.fullmatch(r"([\d.,' \u00a0\u202f]*\d)(?:e([+-]?\d+))?\s*([kMG]?)", text, re.I)
    assert parts
    plain = re.sub(r"[' \u00a0\u202f]", "", parts[1])
    marks = re.findall(r"[.,]", plain)
    decimal = marks[-1] if marks else "."
    if len(marks) > 1 and len(set(marks)) == 1:
        decimal = ""  # 1.234.567
    elif marks == [","] and re.fullmatch(r"[1-9]\d{0,2},\d{3}", plain):
        decimal = "."
    plain = "".join("." if c == decimal else c for c in plain if c.isdigit() or c == decimal)
    scale = 10.0 ** int(parts[2] or 0) * _SCALE.get(parts[3].lower(), 1.0)
    zeros = len(plain) - len(plain.rstrip("0")) if about and "." not in plain else 0
    last = 10.0 ** (zeros - len(plain.partition(".")[2]))
    return float(plain) * scale, last * scale / 2
