"""Which sizes of two studies differ beyond chance.

The rates of a size's repeats are compared as logarithms, so that a difference is a ratio; with two
repeats or more on both sides by Welch's t test, corrected by Holm's method over all sizes tested.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.scaling.welch import Welch, holm, welch
from jobkit.analysis.tables.text import counted

# What may differ on purpose between two studies, and must then be named beside the comparison.
NAMED = (
    *("device", "device_type", "driver_version", "git_commit", "torch_version", "model", "dataset"),
    *("precision", "fp32", "global_batch_size", "batch_size_per_rank", "train_samples"),
)
_Key = tuple[str, str, int, int, str]


@dataclass(frozen=True)
class Comparison:
    """One size in two studies. test: None with fewer than two repeats on a side."""

    size: Size
    repeats: tuple[int, int]
    ratio: float  # of the geometric means of the rates, the study's over the other's
    test: Welch | None
    p_value: float | None  # corrected
    tolerance: float = 0.0  # a share of the rate: p_value is of a difference beyond it

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond chance, and beyond the tolerance."""
        return self.p_value is not None and self.p_value < 1 - CONFIDENCE

    @property
    def slower(self) -> bool:
        """Whether the study is slower than the other beyond chance and tolerance."""
        return self.differs and self.ratio < 1

    def line(self) -> str:
        """The comparison in one line."""
        ranks = counted(self.size.world_size or 0, "rank")
        nodes = f" on {self.size.nodes} nodes" if (self.size.nodes or 1) > 1 else ""
        said = f"{self.size.series} at {ranks}{nodes}: {self.ratio - 1:+.1%}"
        if self.test is None or self.p_value is None:
            few = f"{self.repeats[0]} and {counted(self.repeats[1], 'run')}"
            return f"{said} ({few}): not judged: that takes 2 repeats on both sides"
        low, high = (math.expm1(end) for end in self.test.interval)
        said += f" [{low:+.1%}, {high:+.1%} at 95%]"
        if not self.differs:
            most = f"within {100 * self.tolerance:g} %" if self.tolerance else "chance"
            return f"{said}: may be {most} (p = {self.p_value:.2g})"
        way = "slower" if self.ratio < 1 else "faster"
        return f"{said}: {way} beyond chance (p = {self.p_value:.2g})"


def compare(
    runs: pd.DataFrame, other: pd.DataFrame, tolerance: float = 0.0
) -> tuple[list[Comparison], list[str]]:
    """Compare the sizes that both have; and what could not be compared, or differs, in words.

    runs, other: with the columns of results.csv. tolerance: a share of the rate below which no
    difference counts.
    """
    ours, theirs = _measured(runs), _measured(other)
    margin = -math.log1p(-tolerance)
    tests = {key: _test(ours[key], theirs[key]) for key in ours if key in theirs}
    judged = [key for key, (_, test) in tests.items() if test]
    p_values = holm([t.p_value(margin) for _, t in tests.values() if t])
    corrected = dict(zip(judged, p_values, strict=True))
    made = [
        Comparison(
            ours[key],
            (len(ours[key].rates), len(theirs[key].rates)),
            ratio,
            test,
            corrected.get(key),
            tolerance,
        )
        for key, (ratio, test) in tests.items()
    ]
    alone = [*_alone(ours, theirs, "first"), *_alone(theirs, ours, "second")]
    return made, [*_named(runs, other), *alone]


def _measured(runs: pd.DataFrame) -> dict[_Key, Size]:
    """The sizes with a rate, by what must be the same."""
    return {
        (s.series, s.scaling or "", s.nodes or 1, s.ranks_per_node or 0, s.throughput_unit): s
        for s in sizes(runs)
        if s.rates and all(0 < rate < math.inf for rate in s.rates)
    }


def _test(ours: Size, theirs: Size) -> tuple[float, Welch | None]:
    """The ratio of the rates, and its test where both sides have repeats."""
    logs = [[math.log(rate) for rate in size.rates] for size in (ours, theirs)]
    if min(map(len, logs)) > 1:
        test = welch(*logs)
        return math.exp(test.difference), test
    means = [sum(values) / len(values) for values in logs]
    return math.exp(means[0] - means[1]), None


def _named(runs: pd.DataFrame, other: pd.DataFrame) -> list[str]:
    """What differs between the studies beside the rates, or within one of them."""
    made = []
    for name in NAMED:
        sides = [_values(table, name) for table in (runs, other)]
        if sides[0] != sides[1]:
            made.append(f"{name} differs: {' against '.join(map(_said, sides))}")
    return made


def _values(runs: pd.DataFrame, name: str) -> list[str]:
    ok = runs[runs["status"] == "ok"]
    return sorted({str(v) for v in ok[name].dropna()}) if name in ok else []


def _said(values: Sequence[str]) -> str:
    return (
        ", ".join(values[:5]) + (f" and {len(values) - 5} more" if len(values) > 5 else "") or "?"
    )


def _alone(ours: Mapping[_Key, Size], theirs: Mapping[_Key, Size], name: str) -> list[str]:
    """The sizes that only one study has measured."""
    found = [
        f"{s.series} at {s.world_size}{_unlike(s, theirs.values())}"
        for key, s in ours.items()
        if key not in theirs
    ]
    return [f"only in the {name}: {_said(found)}"] if found else []


def _unlike(size: Size, others: Iterable[Size]) -> str:
    """What keeps a size from being compared with that of the same series and ranks, if any."""
    place = (size.series, size.world_size)
    other = next((o for o in others if (o.series, o.world_size) == place), None)
    if other is None:
        return ""
    pairs = zip(_facts(size), _facts(other), strict=True)
    return f" ({', '.join(f'{own}, not {its}' for own, its in pairs if own != its)})"


def _facts(size: Size) -> tuple[str, str, str]:
    scaling = f"{size.scaling} scaling" if size.scaling else "no kind of scaling known"
    return f"{size.nodes or 1}x{size.ranks_per_node or 0}", scaling, size.throughput_unit
