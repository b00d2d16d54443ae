"""`python -m jobkit compare STUDY OTHER`: which sizes differ beyond chance; a gate for scripts.

The rates of a size's repeats are compared as logarithms of their medians. Their spread is that of
all repeats of both studies, as in scaling.csv; p values are corrected for the number of tests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import Exit, Parser, UsageError, at_least, command

if TYPE_CHECKING:
    import pandas as pd

    from jobkit.analysis.scaling.sizes import Size

_EXAMPLES = """A difference is that of STUDY from OTHER, in per cent of the rate, with its 95 %
interval. It is beyond chance where its p value, corrected for the number of tests (Holm), is under
0.05. One test is of all sizes together. What else differs (devices, commits, days) is named first:
two studies of one day each also differ by what changes from day to day.

examples:
  python -m jobkit compare today last-month
  python -m jobkit compare today --reference reference/results.csv --tolerance 5    in a script

exit codes:
  0  no size of STUDY is slower beyond chance and tolerance
  2  wrong usage: no such study or file, or no size that both have measured
  3  no size could be judged: one repeat of each shows no chance
  4  a size of STUDY, or all of them together, is slower beyond chance and tolerance
"""
# What may differ on purpose between two studies, and must then be named beside the comparison.
_NAMED = (
    *("device", "device_type", "driver_version", "git_commit", "torch_version", "model", "dataset"),
    *("precision", "fp32", "global_batch_size", "batch_size_per_rank", "train_samples"),
)
_DAY_S = 24 * 3600
_SHOWN = 5
_Key = tuple[str, str, int, int, str]


@dataclass(frozen=True)
class Comparison:
    """One size in two studies, or all of them."""

    name: str
    difference: float  # of the logarithms of the rates, the study's less the other's
    error: float | None  # its standard error; None: no repeats show chance
    freedom: int = 0
    p_value: float | None = None  # corrected, of a difference beyond the tolerance
    tolerance: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond chance, and beyond the tolerance."""
        return self.p_value is not None and self.p_value < 0.05

    @property
    def slower(self) -> bool:
        """Whether the study is slower than the other beyond chance and tolerance."""
        return self.differs and self.difference < 0

    def line(self) -> str:
        """The comparison in one line."""
        from jobkit.analysis.scaling.spread import CONFIDENCE, quantile

        text = f"{self.name}: {math.expm1(self.difference):+.1%}"
        if self.error is None or self.p_value is None:
            return f"{text}: not judged: that takes 2 repeats of a size"
        half = quantile(self.freedom, CONFIDENCE) * self.error
        low, high = (math.expm1(self.difference + end) for end in (-half, half))
        text += f" [{low:+.1%}, {high:+.1%} at 95%]"
        if not self.differs:
            what = f"within {100 * self.tolerance:g} %" if self.tolerance else "chance"
            if max(-low, high) < self.tolerance:
                return f"{text}: {what}"
            return f"{text}: may be {what} (p = {self.p_value:.2g})"
        way = "slower" if self.difference < 0 else "faster"
        return f"{text}: {way} beyond chance (p = {self.p_value:.2g})"


def compare(
    runs: "pd.DataFrame", other: "pd.DataFrame", tolerance: float = 0.0
) -> tuple[list[Comparison], list[str]]:
    """Compare the sizes that both have, and all together; what differs beside, in words.

    runs, other: with the columns of results.csv. tolerance: a share of the rate below which no
    difference counts.
    """
    from jobkit.analysis.scaling.scaling import sample_of, shape
    from jobkit.analysis.scaling.spread import holm, pool, tail

    ours, theirs = _measured(runs), _measured(other)
    shared = [key for key in ours if key in theirs]
    samples = {id(s): sample_of(s) for s in (*ours.values(), *theirs.values())}
    spread = pool(list(samples.values()))
    rows: list[tuple[str, float, float | None]] = []
    for key in shared:
        pair = ours[key], theirs[key]
        gap = math.log((pair[0].throughput or 1) / (pair[1].throughput or 1))
        errors = [spread.error(samples[id(s)]) for s in pair] if spread else []
        rows.append((f"{pair[0].series} at {shape(pair[0])}", gap, math.hypot(*errors) or None))
    if spread and len(rows) > 1:
        weights = [1 / (error or 1) ** 2 for _, _, error in rows]
        mean = sum(w * gap for w, (_, gap, _) in zip(weights, rows, strict=True)) / sum(weights)
        rows.append(("on the whole", mean, 1 / math.sqrt(sum(weights))))
    freedom, margin = spread.freedom if spread else 0, -math.log1p(-tolerance)
    raw = [tail(max(0.0, abs(gap) - margin) / error, freedom) for _, gap, error in rows if error]
    corrected: Sequence[float | None] = holm(raw) if spread else [None] * len(rows)
    compared = [
        Comparison(name, gap, error, freedom, p_value, tolerance)
        for (name, gap, error), p_value in zip(rows, corrected, strict=True)
    ]
    alone = [*_alone(ours, theirs, "first"), *_alone(theirs, ours, "second")]
    return compared, [*_named(runs, other), *_days(runs, other), *alone]


def _measured(runs: "pd.DataFrame") -> "dict[_Key, Size]":
    """The sizes with a rate, by what must be the same."""
    from jobkit.analysis.scaling.sizes import sizes

    return {
        (s.series, s.scaling or "", s.nodes or 1, s.ranks_per_node or 0, s.throughput_unit): s
        for s in sizes(runs)
        if s.rates and all(0 < rate < math.inf for rate in s.rates)
    }


def _named(runs: "pd.DataFrame", other: "pd.DataFrame") -> list[str]:
    """What differs between the studies beside the rates, or within one of them."""
    lines = []
    for name in _NAMED:
        sides = []
        for table in (runs, other):
            ok = table[table["status"] == "ok"]
            sides.append(sorted({str(v) for v in ok[name].dropna()}) if name in ok else [])
        if sides[0] != sides[1]:
            lines.append(f"{name} differs: {' against '.join(map(_some, sides))}")
    return lines


def _days(runs: "pd.DataFrame", other: "pd.DataFrame") -> list[str]:
    """Whether each study was measured on one day, and the days differ."""
    spans = []
    for table in (runs, other):
        starts = table.loc[table["status"] == "ok", "start_time_s"].dropna()
        spans.append((float(starts.min()), float(starts.max())) if len(starts) else None)
    if None in spans:
        return []
    (first, first_end), (second, second_end) = spans  # type: ignore[misc]
    days = [end - start < _DAY_S for start, end in ((first, first_end), (second, second_end))]
    gap = max(first, second) - min(first_end, second_end)
    if not all(days) or gap < _DAY_S / 2:
        return []
    text = "each study was measured on one day, and days differ: repeat both on several, or give "
    return [f"{text}--tolerance what days differ by"]


def _some(values: Sequence[str]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return f"{', '.join(values[:_SHOWN])}{more}" or "?"


def _alone(ours: "Mapping[_Key, Size]", theirs: "Mapping[_Key, Size]", name: str) -> list[str]:
    """The sizes that only one study has measured."""
    rest = theirs.values()
    alone = [
        f"{s.series} at {s.world_size}{_unlike(s, rest)}"
        for k, s in ours.items()
        if k not in theirs
    ]
    return [f"only in the {name}: {_some(alone)}"] if alone else []


def _unlike(size: "Size", others: "Iterable[Size]") -> str:
    """What keeps a size from being compared with that of the same series and ranks, if any."""
    place = (size.series, size.world_size)
    other = next((o for o in others if (o.series, o.world_size) == place), None)
    if other is None:
        return ""
    pairs = zip(_facts(size), _facts(other), strict=True)
    return f" ({', '.join(f'{own}, not {its}' for own, its in pairs if own != its)})"


def _facts(size: "Size") -> tuple[str, str, str]:
    scaling = f"{size.scaling} scaling" if size.scaling else "no kind of scaling known"
    return f"{size.nodes or 1}x{size.ranks_per_node or 0}", scaling, size.throughput_unit


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare two studies; return the exit code."""
    text = "Compare the rates of two studies, or of a study and a results.csv kept as reference."
    parser = Parser(prog="jobkit compare", description=text, epilog=_EXAMPLES)
    parser.add_argument("study", metavar="STUDY", help="a study's folder or bare name")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="the study to compare it with")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="a results.csv, not OTHER")
    parser.add_argument(
        "--tolerance",
        type=at_least(float, 0),
        default=0.0,
        metavar="PERCENT",
        help="differences up to this many per cent do not count (default: 0)",
    )
    args = parser.parse_args(argv)
    if (args.other is None) == (args.reference is None):
        raise UsageError("give OTHER or --reference FILE, one of the two")
    if args.tolerance >= 100:
        raise UsageError(f"--tolerance {args.tolerance:g}: must be below 100 per cent")

    from jobkit.analysis.collect.results import OUTDATED, Results

    studies = [Results.load(name) for name in (args.study, args.other) if name]
    outdated = [f"{study.name}: {OUTDATED}" for study in studies if study.is_outdated]
    other = _reference(args.reference) if args.reference else studies[1].runs
    compared, remarks = compare(studies[0].runs, other, args.tolerance / 100)
    if not compared:
        raise UsageError(f"no size that both have measured ({'; '.join(remarks) or 'no rates'})")
    for line in (*outdated, *remarks, *(c.line() for c in compared)):
        print(line)
    sizes = [c for c in compared if c.name != "on the whole"]
    judged, slower = sum(c.p_value is not None for c in sizes), sum(c.slower for c in sizes)
    beyond = f" by more than {args.tolerance:g} %" if args.tolerance else ""
    print(f"{judged} of {len(sizes)} sizes judged: {slower} slower{beyond} beyond chance")
    if not judged:
        return Exit.INCOMPLETE
    return Exit.THRESHOLD if any(c.slower for c in compared) else Exit.OK


def _reference(path: Path) -> "pd.DataFrame":
    """The rows of a results.csv that was kept."""
    from jobkit.analysis.tables.columns import RESULTS
    from jobkit.analysis.tables.frames import read_table

    table = read_table(path, RESULTS)
    needed = ("series", "world_size", "status", "throughput")
    if missing := [name for name in needed if table[name].isna().all()]:
        raise UsageError(f"{path}: no results.csv of jobkit: it lacks {', '.join(missing)}")
    return table
