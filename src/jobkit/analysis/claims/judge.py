"""Which claims follow: each recomputed as an interval, from the figures of its own series."""

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.analysis.claims.document import UNITS, Quantity, Row, headings, rows_of
from jobkit.analysis.claims.numbers import NUMBER, Number, number

_UNITS = {"speed_up": "x", "efficiency": " %", "rate": " samples/s", "memory": "", "linear": ""}
_PER_STEP = r"(?:per |/ ?)(?:step|iter|batch)"
_PER_EPOCH = r"(?:per[ _]|/ ?)epoch"
_SAMPLES = r"sample|image|example|\bimgs?\b|throughput(?!.*(?:/|per|_s\b))"
_PART = (  # of a training, or something else: no time of the training
    r"step|iter|batch(?![ _-]?size)|laten|infer|serv|request|first|start|warm|forward|backward|"
    r"load|sav|check|eval|valid|\btest|compil|commun|reduce|gather|sync|wait|import|export|help"
)
_ONE = {"speed_up": 1.0, "efficiency": 100.0}
_MEMORY = "memory follows from no other number"


@dataclass(frozen=True)
class Work:
    """The amount of training in the times of a table, as far as it is known."""

    samples: Sequence[float] = ()
    epochs: Sequence[float] = ()
    weak: bool = False


@dataclass(frozen=True)
class Verdict:
    """One claim, whether it follows (None: not judged), and how it was computed, or why not."""

    line: int
    claim: Quantity
    follows: bool | None
    how: str

    @property
    def said(self) -> str:
        """The claim as it is written."""
        text = self.claim.number.text
        if not text[-1].isdigit() or (self.claim.kind == "rate" and self.follows is None):
            return text  # a rate that was not judged need not be of samples
        return text + _UNITS.get(self.claim.kind, "")


class Unjudged(Exception):
    """Why a claim cannot be judged; empty where it is none."""


def check(text: str, work: Work = Work()) -> list[Verdict]:
    """Every claim of a text; follows is None where it cannot be judged."""
    rows = list(rows_of(text))
    starts, lines = [0, *headings(text)], text.splitlines(keepends=True)
    parts = ["".join(lines[i:j]) for i, j in zip(starts, [*starts[1:], None], strict=True)]
    works = [_with_stated(work, part) for part in parts]  # a number holds for its own section
    made = []
    for row in rows:
        work = works[bisect(starts, row.line - 1) - 1]
        for claim in row.values:
            try:
                readings = _JUDGES.get(claim.kind, _other)(row, claim, rows, work)
                made.append(Verdict(row.line, claim, _meets(claim, readings), readings[0].text))
            except Unjudged as why:
                if str(why):
                    made.append(Verdict(row.line, claim, None, str(why)))
    return made


def _meets(claim: Quantity, readings: list[Number]) -> bool:
    """Whether a reading could be written as the claim, with the rounding of both."""
    low, high = claim.number.low, claim.number.high
    high += (high - low) / 2 if high < float("inf") else 0  # its digits may be cut, not rounded
    low, high = low * (1 - 1e-9), high * (1 + 1e-9)
    return any(low <= r.high and r.low <= high for r in readings)


def _other(row: Row, claim: Quantity, rows: list[Row], work: Work) -> list[Number]:
    unclear = claim.kind in ("factor", "percent")
    raise Unjudged("no speed-up or efficiency of one size" if unclear else "")


def _evidence(row: Row) -> list[Quantity]:
    return [q for q in row.values if q.kind in ("time", "rate")]


def _ratio(row: Row, claim: Quantity, rows: list[Row], work: Work) -> list[Number]:
    """The values of a speed-up or an efficiency, by each reading of its row."""
    own = [r for r in rows if r.block == row.block]
    units = [u for u in UNITS if u in row.sizes]
    if not units:
        raise Unjudged("no one size beside it")
    unit = max(units, key=lambda u: len({r.sizes.get(u) for r in own}))
    n = row.sizes[unit]
    own = [r for r in own if unit in r.sizes]
    group = [r for r in own if r.series == row.series]
    at = [row] if _evidence(row) else [r for r in group if r.sizes[unit] == n and _evidence(r)]
    if not at and claim.kind == "efficiency" and (found := _of_speed_up(row, group, unit)):
        return found
    if not at:
        own = group = _elsewhere(rows, row, unit)
        at = [r for r in group if r.sizes[unit] == n]
    base, stated = _base(claim, group, unit, row.base)
    sure = True
    if (stated and not _one(stated)) or base[0].sizes[unit] == n:
        if _one(stated):
            raise Unjudged("")  # the base itself
        base, stated = _base(claim, own, unit, row.base)
        series = {r.series for r in base}
        if base[0].sizes[unit] >= n or len(series) > 1 or (stated and not _one(stated)):
            raise Unjudged("relative to a run that is not in its table")
        sure = series == {""}
    readings = _readings(claim, at, base, unit, work.weak)
    if not sure:  # the base of another series is theirs if their first claim says so
        least = min(r.sizes[unit] for r in group)
        for r in (r for r in group if r.sizes[unit] == least):
            for q in (q for q in r.values if _same(q, claim)):
                if not _meets(q, _readings(q, [r], base, unit, work.weak)):
                    raise Unjudged("relative to a run that is not in its table")
    return readings


def _same(one: Quantity, other: Quantity) -> bool:
    return (one.kind, one.words) == (other.kind, other.words)


def _one(claims: list[Quantity]) -> bool:
    return any(q.number.low <= _ONE[q.kind] <= q.number.high for q in claims)


def _base(
    claim: Quantity, rows: list[Row], unit: str, size: float
) -> tuple[list[Row], list[Quantity]]:
    """The rows of the smallest size, or of that size, and what they claim themselves."""
    known = [r for r in rows if _evidence(r)]
    least = size or min(r.sizes[unit] for r in known)
    found = [r for r in known if r.sizes[unit] == least]
    if not found:
        raise Unjudged("no time or rate of what it is compared with")
    return found, [q for r in found for q in r.values if _same(q, claim)]


def _elsewhere(rows: list[Row], row: Row, unit: str) -> list[Row]:
    """The one series with times or rates of a sentence's size, and of a smaller one."""
    made = [[r for r in g if row.loose and unit in r.sizes] for g in _series(rows)]
    sizes = [{r.sizes[unit] for r in group} for group in made]
    n = row.sizes[unit]
    found = [g for g, ns in zip(made, sizes, strict=True) if n in ns and min(ns) < n]
    if len(found) != 1:
        raise Unjudged(f"{'several' if found else 'no'} series with times or rates of its size")
    return found[0]


def _series(rows: list[Row]) -> list[list[Row]]:
    """The rows with times or rates, by their series."""
    made: dict[tuple[int, str], list[Row]] = {}
    for r in rows:
        if _evidence(r) and r.sizes:
            made.setdefault((r.block, r.series), []).append(r)
    return list(made.values())


def _readings(
    claim: Quantity, at: list[Row], base: list[Row], unit: str, weak: bool
) -> list[Number]:
    grown = at[0].sizes[unit] / base[0].sizes[unit]
    found = [q for r in at for q in _evidence(r)]
    variants = {q.words for q in found}
    near = {w for w in variants if w & claim.words}
    if claim.words in variants or len(near) == 1:
        variants = {claim.words} if claim.words in variants else near
    elif len(variants) > 1 or (claim.words and any(variants)):
        raise Unjudged("several columns it may belong to")
    made = []
    for q in (q for q in found if q.words in variants):
        bases = [b.number for r in base for b in _evidence(r) if _same(b, q)]
        if not bases:
            continue
        one = Number(bases[0].text, min(b.low for b in bases), max(b.high for b in bases))
        up, down = (one, q.number) if q.kind == "time" else (q.number, one)
        words = re.findall(r"\b(weak|strong)\b", at[0].context)
        plain = q.kind == "rate" or (not weak and words[-1:] != ["weak"])
        both = plain and q.kind == "time" and not words and re.search(_PER_STEP, at[0].context)
        total = q.per_rank or not plain
        for scaled in (False, True) if both and not total else (total,):
            factor = (grown if scaled else 1.0) * (100 / grown if claim.kind == "efficiency" else 1)
            low, high = factor * up.low / down.high, factor * up.high / down.low
            how = f"{up.text} / {down.text}" + f" x {grown:g}" * scaled
            how += f" / {grown:g}" * (claim.kind == "efficiency")
            how += f" = {(low + high) / 2:.4g}{_UNITS[claim.kind]} [{low:.4g}, {high:.4g}]"
            made.append(Number(how, low, high))
    if not made:
        raise Unjudged("no time or rate of what it is compared with")
    return made


def _of_speed_up(row: Row, group: list[Row], unit: str) -> list[Number]:
    """An efficiency from the speed-up beside it, over its size or relative to the smallest."""
    n, least = row.sizes[unit], min(r.sizes[unit] for r in group)
    made = []
    for q in (q for q in row.values if q.kind == "speed_up"):
        for grown in (n, n / least):
            how = f"speed-up {q.number.text} / {grown:g}"
            made.append(Number(how, 100 * q.number.low / grown, 100 * q.number.high / grown))
    return made


def _rate(row: Row, claim: Quantity, rows: list[Row], work: Work) -> list[Number]:
    """Samples per second: samples x epochs / time, where all are known."""
    near = [row] if not row.loose else [r for r in rows if r.block == row.block]
    times, rates = ([q for r in near for q in r.values if q.kind == k] for k in ("time", "rate"))
    samples, epochs = _middle(row, "samples") or work.samples, _middle(row, "epochs") or work.epochs
    alone = len(times) == 1 and (len(rates) == 1 or not row.loose) and not claim.per_rank
    if alone and re.search(_PER_EPOCH, times[0].said, re.I):
        epochs = [1.0]
    elif re.search(_PER_EPOCH, row.context):
        epochs = [1.0, *epochs]
    if not (alone and samples and epochs and re.search(_SAMPLES, claim.said, re.I)):
        raise Unjudged("no samples, epochs and time beside it")
    if re.search(_PART, times[0].said, re.I):
        raise Unjudged("the time beside it is not that of the training")
    time = times[0].number
    made = []
    for amount in (s * e for s in samples for e in epochs):
        low, high = amount / time.high, amount / time.low
        how = f"{amount:,.0f} samples / {time.text} = {(low + high) / 2:,.0f} samples/s"
        made.append(Number(f"{how} [{low:,.0f}, {high:,.0f}]", low, high))
    return made


def _middle(row: Row, kind: str) -> list[float]:
    """The numbers of a kind in a row."""
    return [(q.number.low + q.number.high) / 2 for q in row.values if q.kind == kind]


def _linear(row: Row, claim: Quantity, rows: list[Row], work: Work) -> list[Number]:
    """The efficiency at the largest size of each series, for "linear scaling" without a number."""
    made = []
    for group in _series(rows):
        unit = max(UNITS, key=lambda u: len({r.sizes.get(u) for r in group}))
        sized = [r for r in group if unit in r.sizes]
        ends = [fn(sized, key=lambda r: r.sizes[unit], default=row) for fn in (min, max)]
        if ends[0] is not ends[1]:
            wanted = Quantity("efficiency", claim.number)
            made += _readings(wanted, ends[1:], ends[:1], unit, work.weak)
    if not made:
        raise Unjudged("no series with times or rates")
    return [min(made, key=lambda n: n.high)]


def _memory(row: Row, claim: Quantity, rows: list[Row], work: Work) -> list[Number]:
    """Memory of one GPU: n times the base's beside less at the same size is a total of n GPUs."""
    own = [(r, q) for r in rows if r.block == row.block for q in r.values if _same(q, claim)]
    unit = next((u for u in UNITS if u in row.sizes), "")
    ones = [q.number for r, q in own if r.sizes.get(unit) == 1]
    n = row.sizes.get(unit, 1.0)
    others = [q.number for r, q in own if r.sizes.get(unit) == n]
    if len(ones) != 1 or n == 1 or claim.number.low / n > ones[0].high:
        raise Unjudged(_MEMORY)
    if not claim.number.low <= n * ones[0].high or claim.number.high < n * ones[0].low:
        raise Unjudged(_MEMORY)
    if all(claim.number.low <= o.high for o in others):
        raise Unjudged(_MEMORY)
    how = f"a total over {n:g}: {n:g} x {ones[0].text}, where others of this size have one GPU's"
    return [Number(how, ones[0].low, ones[0].high)]


_WORK = {"samples": r"(?:samples|images|examples)", "epochs": r"epochs"}
_JUDGES = {
    "speed_up": _ratio,
    "efficiency": _ratio,
    "rate": _rate,
    "linear": _linear,
    "memory": _memory,
}


def _with_stated(work: Work, text: str) -> Work:
    """The work with the samples and epochs that the text gives, as in "for 10 epochs"."""
    given = {"samples": work.samples, "epochs": work.epochs}
    for what, name in _WORK.items():
        if not given[what]:
            count = rf"(?<!batches of )(?<!batch of )({NUMBER})\s*(?:training\s+)?{name}"
            said = re.findall(rf"{count}\b(?!\s*(?:/|per))", text, re.I)
            said += re.findall(rf"\b(?:num_)?{name}\s*[:=]\s*({NUMBER})", text, re.I)
            given[what] = sorted({(n.low + n.high) / 2 for t in said if (n := number(t))})
    split = re.search(rf"train_split\s*[:=]\s*({NUMBER})", text)
    if split and (share := number(split[1])):
        middle = (share.low + share.high) / 2
        given["samples"] = [n * middle for n in given["samples"]]
    return Work(given["samples"], given["epochs"], work.weak)
