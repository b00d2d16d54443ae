"""The scaling laws fitted to a study, and predictions for sizes not measured.

Forecast.at is the one owner of a forecast: the table, the terminal, the verdict, the report and the
figure show what it gives. step_forecast.py puts the step model's values in, where it is taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.fits import Fit, best
from jobkit.analysis.scaling.predict import MIN_SIZES, Prediction, predict
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.columns import FORECAST
from jobkit.analysis.tables.frames import Row, frame, records
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError

# What a forecast is made with, in the column law, and in words.
LAW, STEP = "average", "step model"
SOURCES = {LAW: "average of laws", STEP: "step model with the measured links"}
NO_INTERVAL = (math.nan, math.nan)


@dataclass(frozen=True)
class Beyond:
    """The forecast of one size: each value with the ends of its interval, NaN where it has none."""

    law: str
    rate: tuple[float, float, float]  # in the unit of the series
    speed_up: tuple[float, float, float]  # over the smallest measured size
    missed: str = ""  # of the step model: by how much it missed a held-out size

    @property
    def interval(self) -> str:
        """The interval of the speed-up in words, or what stands for it."""
        _, low, high = self.speed_up
        if math.isnan(low):
            return f"no prediction interval; it missed {self.missed}"
        return f"95% prediction interval [{low:.3g}, {high:.3g}]"


@dataclass(frozen=True)
class Forecast:
    """The laws fitted to one curve, and the prediction for larger sizes."""

    series: str
    scaling: str
    base: Size
    measured: tuple[int, ...]
    fits: tuple[Fit, ...]  # to describe the curve
    sizes: tuple[int, ...] = ()  # to forecast; all beyond what was measured
    left_out: int = 0  # runs that are outliers: not fitted
    prediction: Prediction | None = None  # none: too few sizes, or none is wanted
    reasons: tuple[str, ...] = ()  # why a size that was wanted is not among sizes
    nodes: int = 1  # the most that a measured size had
    per_node: int | None = None  # ranks of a full node; None: not known
    elsewhere: bool = False  # whether more nodes were measured too, with as many ranks
    by_steps: Mapping[int, Beyond] = field(default_factory=dict)  # where the step model is taken

    def at(self, ranks: int) -> Beyond:
        """The forecast of one of its sizes, by what is taken for it."""
        if ranks in self.by_steps:
            return self.by_steps[ranks]
        made = self.prediction
        assert made is not None  # it has sizes
        return Beyond(LAW, (made.rate(ranks), *made.interval(ranks)), made.speed_up(ranks))

    @property
    def refused(self) -> str:
        """Why there is no forecast of this series; empty where there is one."""
        if len(self.measured) >= MIN_SIZES:
            return ""
        sizes = ", ".join(map(str, self.measured)) or "none"
        return (
            f"{self.series}: {MIN_SIZES} different sizes are needed for a fit (measured: {sizes})"
        )

    @property
    def caution(self) -> str:
        """What a reader must know before the numbers; empty where there is nothing."""
        if self.nodes > 1:
            return ""
        if self.per_node is None:
            text = f"every measured size of {self.series} is on one node"
            if self.elsewhere:
                text = f"the forecast of {self.series} uses its sizes on one node only"
            return (
                f"{text}, so what communication between nodes costs is not known "
                "(--ranks-per-node says where nodes end)"
            )
        across = [n for n in self.sizes if n > (self.per_node or 0)]
        if not across:
            return ""
        return (
            f"the forecast of {self.series} crosses from one node to "
            f"{-(-across[-1] // self.per_node)}, which no size it is made from does: what "
            f"communication between nodes costs is taken from {self._source(across)}"
        )

    def _source(self, across: Sequence[int]) -> str:
        """What says the cost of a node boundary that these sizes cross."""
        if across[-1] not in self.by_steps:
            return "published tables"
        by_laws = ", ".join(str(n) for n in across if n not in self.by_steps)
        return "the measured links" + (
            f", for {by_laws} ranks from published tables" if by_laws else ""
        )


def forecasts(
    results: Results, wanted: Sequence[int] = (), per_node: int | None = None
) -> list[Forecast]:
    """The fitted laws of every measured series, and the wanted sizes beyond its largest one.

    Of a world size with several node counts, the fewest nodes count. per_node: ranks of a full
    node; None: as many as the measured sizes have that are on several. Raises UsageError where it
    contradicts a measured size.
    """
    curves: dict[str, dict[int, Size]] = {}
    elsewhere = set()
    for size in results.sizes:
        if size.speed_up is not None and size.world_size:
            curve = curves.setdefault(size.series, {})
            if curve.setdefault(size.world_size, size) is not size:
                elsewhere.add(size.series)
    made = [_forecast(list(curve.values()), wanted, per_node) for curve in curves.values()]
    return [replace(one, elsewhere=one.series in elsewhere) for one in made]


def checked_forecasts(
    results: Results, wanted: Sequence[int], per_node: int | None = None
) -> list[Forecast]:
    """The forecasts; raises UsageError with the reason where no series has one."""
    found = forecasts(results, wanted, per_node)
    if any(f.sizes for f in found):
        return found
    reasons = [r for f in found for r in not_forecast(f)]
    raise UsageError(f"no forecast: {'; '.join(reasons) or 'no series has sizes to compare'}")


def not_forecast(one: Forecast) -> list[str]:
    """Why wanted sizes of this series have no forecast."""
    if one.refused:
        return [one.refused]
    none = f"{one.series}: measured up to {max(one.measured)}"
    return list(one.reasons) if one.sizes or one.reasons else [none]


def forecast_table(results: Results, found: Sequence[Forecast]) -> pd.DataFrame:
    """A row for each series and size to forecast, with the columns FORECAST."""
    study = results.name
    rows = [_row(f, n) | {"study": study} for f in found for n in f.sizes]
    return frame(rows, FORECAST)


def forecast_lines(table: pd.DataFrame) -> list[str]:
    """One line for each forecast, for a terminal."""
    return [
        f"forecast (not measured): {row['series']} at {row['world_size']} ranks: speed-up "
        f"{row['speed_up']:.3g} [{_ends(row)}], efficiency {row['efficiency']:.0%}, "
        f"{row['times_beyond']:.3g} times beyond the largest measured size "
        f"({SOURCES[row['law']]}, from {row['measured_sizes']}{_without(row)})"
        for row in records(table)
    ]


def _ends(row: dict[str, Any]) -> str:
    if pd.isna(row["speed_up_low"]):
        return "no interval"
    return f"{row['speed_up_low']:.3g}, {row['speed_up_high']:.3g} at 95%"


def _without(row: dict[str, Any]) -> str:
    count = row["outliers_left_out"]
    return f", without {counted(count, 'outlier')}" if count else ""


def _forecast(curve: list[Size], wanted: Sequence[int], given: int | None) -> Forecast:
    runs = [
        (s.world_size or 0, rate, run in (s.outliers or "").split(", "))
        for s in curve
        for run, rate in zip(s.rated_runs, s.rates, strict=True)
        if 0 < rate < math.inf  # it comes from a log
    ]
    # One run slowed down by other jobs would distort the forecast.
    ranks, rates = [n for n, _, wrong in runs if not wrong], [x for _, x, w in runs if not w]
    first, scaling = curve[0], curve[0].scaling or "strong"
    measured = tuple(sorted(set(ranks)))
    beyond = sorted({n for n in wanted if n > max(measured, default=0)})
    nodes, per_node = {s.world_size or 0: s.nodes or 1 for s in curve}, _per_node(curve, given)
    enough = beyond and len(measured) >= MIN_SIZES
    made = predict(ranks, rates, scaling, per_node, nodes) if enough else None
    refusals = {n: made.refused(n) for n in beyond} if made else {}
    return Forecast(
        series=first.series,
        scaling=scaling,
        base=first,
        measured=measured,
        fits=tuple(best(scaling, ranks, rates)),
        sizes=tuple(n for n, why in refusals.items() if not why),
        left_out=sum(wrong for _, _, wrong in runs),
        prediction=made,
        reasons=tuple(f"{first.series}: {why}" for why in refusals.values() if why),
        nodes=max(nodes.values()),
        per_node=per_node,
    )


def _per_node(curve: Sequence[Size], given: int | None) -> int | None:
    """The ranks of a full node; None: not known. Raises UsageError where given contradicts it."""
    for size in curve:
        if given and (size.world_size or 0) > given * (size.nodes or 1):
            raise UsageError(
                f"--ranks-per-node {given}: {size.series} was measured with {size.world_size} "
                f"ranks on {counted(size.nodes or 1, 'node')}"
            )
    across = [s.ranks_per_node or 1 for s in curve if (s.nodes or 1) > 1]
    return given or max(across, default=None)


def _row(one: Forecast, ranks: int) -> Row:
    made, base = one.at(ranks), one.base.world_size or 1
    row: Row = {
        "series": one.series,
        "kind": "forecast",
        "law": made.law,
        "measured_sizes": ", ".join(map(str, one.measured)),
        "times_beyond": ranks / max(one.measured),
        "world_size": ranks,
        "outliers_left_out": one.left_out,
        "throughput_unit": one.base.throughput_unit,
        "time_of": one.base.time_of,
    }
    for end, rate, speed_up in zip(("", "_low", "_high"), made.rate, made.speed_up, strict=True):
        row |= {f"throughput{end}": rate, f"speed_up{end}": speed_up}
        row[f"efficiency{end}"] = speed_up * base / ranks
    if amount := one.base.time_amount:
        row["time_s"], row["time_high_s"], row["time_low_s"] = (amount / rate for rate in made.rate)
    return row
