"""The scaling laws fitted to a study, and their predictions for sizes not measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.fits import LAWS, Fit, best
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import outliers
from jobkit.analysis.tables.columns import FORECAST
from jobkit.analysis.tables.frames import Row, frame, records
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError

_LEAST = min(len(names) for names in LAWS.values()) + 2


@dataclass(frozen=True)
class Forecast:
    """The laws of one curve, and the sizes to forecast with the first of them."""

    series: str
    scaling: str
    base: Size
    measured: tuple[int, ...]
    fits: tuple[Fit, ...]  # the one to forecast with first; none: too few sizes
    sizes: tuple[int, ...] = ()  # to forecast; all beyond what was measured
    left_out: int = 0  # runs that are outliers: not fitted

    @property
    def refused(self) -> str:
        """Why there is no forecast of this series; empty where there is one."""
        if self.fits:
            return ""
        sizes = ", ".join(map(str, self.measured)) or "none"
        return f"{self.series}: {_LEAST} different sizes are needed for a fit (measured: {sizes})"


def forecasts(results: Results, wanted: Sequence[int] = ()) -> list[Forecast]:
    """The fitted laws of every measured series, and the wanted sizes beyond its largest one.

    Of a world size with several node counts, the fewest nodes count.
    """
    curves: dict[str, dict[int, Size]] = {}
    for size in results.sizes:
        if size.speed_up is not None and size.world_size:
            curves.setdefault(size.series, {}).setdefault(size.world_size, size)
    return [_forecast(list(curve.values()), wanted) for curve in curves.values()]


def checked_forecasts(results: Results, wanted: Sequence[int]) -> list[Forecast]:
    """The forecasts; raises UsageError with the reason where no series has one."""
    found = forecasts(results, wanted)
    if any(f.fits and f.sizes for f in found):
        return found
    reasons = [f.refused or f"{f.series}: measured up to {max(f.measured)}" for f in found]
    raise UsageError(f"no forecast: {'; '.join(reasons) or 'nothing was measured'}")


def forecast_table(results: Results, found: Sequence[Forecast]) -> pd.DataFrame:
    """A row for each series and size to forecast, with the columns FORECAST."""
    study = results.name
    rows = [_row(f, n) | {"study": study} for f in found if f.fits for n in f.sizes]
    return frame(rows, FORECAST)


def forecast_lines(table: pd.DataFrame) -> list[str]:
    """One line for each forecast, for a terminal."""
    return [
        f"forecast (not measured): {row['series']} at {row['world_size']} ranks: speed-up "
        f"{row['speed_up']:.3g} [{row['speed_up_low']:.3g}, {row['speed_up_high']:.3g}], "
        f"efficiency {row['efficiency']:.0%}, {row['times_beyond']:.3g} times beyond the largest "
        f"measured size ({row['law']}, from {row['measured_sizes']}{_without(row)})"
        for row in records(table)
    ]


def _without(row: dict[str, Any]) -> str:
    count = row["outliers_left_out"]
    return f", without {counted(count, 'outlier')}" if count else ""


def _forecast(curve: list[Size], wanted: Sequence[int]) -> Forecast:
    runs = [
        (s.world_size or 0, rate, wrong)
        for s in curve
        for rate, wrong in zip(s.rates, outliers(s.rates), strict=True)
    ]
    # One run slowed down by other jobs would distort a least-squares fit.
    ranks, rates = [n for n, _, wrong in runs if not wrong], [x for _, x, w in runs if not w]
    first, last = curve[0], max(ranks)
    beyond = tuple(sorted({n for n in wanted if n > last}))
    scaling = first.scaling or "strong"
    measured = tuple(sorted(set(ranks)))
    fits = tuple(best(scaling, ranks, rates))
    left_out = sum(wrong for _, _, wrong in runs)
    return Forecast(first.series, scaling, first, measured, fits, beyond, left_out)


def _row(one: Forecast, ranks: int) -> Row:
    law, base = one.fits[0], one.base.world_size or 1
    rate, (low, high) = law.rate(ranks), law.interval(ranks)
    row: Row = {
        "series": one.series,
        "kind": "forecast",
        "law": law.law,
        "measured_sizes": ", ".join(map(str, law.sizes)),
        "times_beyond": ranks / max(law.sizes),
        "world_size": ranks,
        "outliers_left_out": one.left_out,
    }
    for end, value in (("", rate), ("_low", low), ("_high", high)):
        speed_up = value / law.rate(base)
        row |= {f"images_per_s{end}": value, f"speed_up{end}": speed_up}
        row[f"efficiency{end}"] = speed_up * base / ranks
    if one.base.train_samples:
        times = [one.base.train_samples / value for value in (low, rate, high)]
        row["time_per_epoch_s"] = median(times)
        row |= {"time_per_epoch_low_s": min(times), "time_per_epoch_high_s": max(times)}
    return row
