"""Speed-up, efficiency and cost of every series at every size, with their intervals: scaling.csv.

Pure functions of data frames. The baseline of a series is its smallest measured size: the same
strategy and the same settings. With X(N) the training images a second on N ranks and B the
baseline's ranks

    speed-up    S(N) = X(N) / X(B)          strong: the same as t(B) / t(N)
    efficiency  E(N) = S(N) x B / N         weak: of the scaled speed-up (Gustafson, CACM 31, 1988)

Strong and weak scaling are different series and never share a baseline.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from jobkit.analysis.scaling import spread
from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.analysis.tables.columns import SCALING
from jobkit.analysis.tables.frames import frame

RULE = "the same strategy and settings at the smallest measured size"
_OWN = frozenset(c.name for c in SCALING)
Row = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class _Measured:
    """A size with the spread of its rate."""

    size: Size
    origin: str  # of the spread: what the values are
    count: int  # values
    samples: spread.Values | None  # resampled medians of images_per_s


def scaling(
    runs: pd.DataFrame, epochs: pd.DataFrame, accuracy: float | None = None, seed: int = 0
) -> pd.DataFrame:
    """A row for each series and size, with the columns SCALING. Series that mix are not compared.

    accuracy: the validation accuracy to be reached; None: what every run that is ok has reached.
    """
    found = [_measured(s, epochs, seed) for s in sizes(runs)]
    bases: dict[str, _Measured] = {}
    for one in found:
        if one.size.speed_up is not None:  # small sizes come first
            bases.setdefault(one.size.series, one)
    target = _common_accuracy(runs) if accuracy is None else accuracy
    reached = _epochs_to(epochs, target)
    rows = [_row(one, bases.get(one.size.series)) | _cost(one, target, reached) for one in found]
    _tell_apart(rows)
    study = runs["study"].iloc[0] if len(runs) else None
    return frame([row | {"study": study} for row in rows], SCALING)


def _measured(size: Size, epochs: pd.DataFrame, seed: int) -> _Measured:
    """The spread of a size: over its repeats; over the epochs of the run where there is one."""
    values, origin = list(size.rates), f"{len(size.rates)} repeats"
    if len(values) == 1:
        values = _rates_of_epochs(epochs[epochs["run_id"] == size.ok_runs[0]])
        origin = f"{len(values)} epochs of one run"
    label = f"{size.series} {size.nodes}x{size.ranks_per_node}"
    samples = spread.medians(values, label, seed)
    return _Measured(size, origin if samples is not None else "", len(values), samples)


def _rates_of_epochs(epochs: pd.DataFrame) -> list[float]:
    """The rates of a run's epochs, without the first of an attempt where there are others."""
    timed = epochs.dropna(subset=["images_per_s"])
    first = timed["epoch"] == epochs.groupby("attempt", dropna=False)["epoch"].transform("min")
    later = timed[~first.fillna(False)]
    return [float(v) for v in (later if len(later) else timed)["images_per_s"]]


def _row(one: _Measured, base: _Measured | None) -> Row:
    """What was measured at a size, and how it compares with the baseline."""
    size, samples = one.size, one.samples
    row: Row = {k: v for k, v in vars(size).items() if k in _OWN}
    row |= {"runs_planned": size.planned, "runs_ok": size.ok, "note": size.note or None}
    flags = zip(size.ok_runs, spread.outliers(size.rates), strict=False)
    row["outliers"] = ", ".join(run_id for run_id, wrong in flags if wrong) or None
    if samples is not None:
        row |= {"spread_from": one.origin, "confidence_share": spread.confidence(one.count)}
        low, high = spread.interval(samples)
        row |= {"images_per_s_low": low, "images_per_s_high": high}
        if size.train_samples:
            row["time_per_epoch_low_s"] = size.train_samples / high
            row["time_per_epoch_high_s"] = size.train_samples / low
    if size.images_per_s is None:
        row["note"] = row["note"] or "no run that is ok measured it"
    elif base and size.speed_up is not None:
        row |= _compared(one, base)
    return row


def _compared(one: _Measured, base: _Measured) -> Row:
    """The intervals of speed-up and efficiency; both ends are the value at the baseline itself."""
    own, other = one.size, base.size
    assert own.world_size and other.world_size
    row: Row = {"baseline": f"{other.series} at {shape(other)}: {RULE}"}
    if one is base:
        ends: Interval = (1.0, 1.0)
    elif one.samples is None or base.samples is None:
        return row
    else:
        ends = spread.interval(one.samples / base.samples)
        if one.origin != base.origin:
            row["spread_from"] = f"{one.origin} (baseline: {base.origin})"
        row["confidence_share"] = spread.confidence(min(one.count, base.count))
    share = other.world_size / own.world_size
    row |= {"speed_up_low": ends[0], "speed_up_high": ends[1]}
    return row | {"efficiency_low": ends[0] * share, "efficiency_high": ends[1] * share}


def _cost(one: _Measured, target: float | None, reached: dict[str, float]) -> Row:
    """What an epoch costs, and how long it takes to the target accuracy."""
    size = one.size
    row: Row = {"target_accuracy": target}
    time, ranks = size.time_per_epoch_s, size.world_size
    if size.images_per_s is not None and ranks:
        row["images_per_s_per_rank"] = size.images_per_s / ranks
    if time is None or not ranks:
        return row
    row["gpu_hours_per_epoch"] = time * ranks / 3600
    row["node_hours_per_epoch"] = time * (size.nodes or 1) / 3600
    needed = [reached[r] for r in size.ok_runs if r in reached]
    if needed and len(needed) == size.ok:
        row["epochs_to_accuracy"] = median(needed)
        row["time_to_accuracy_s"] = median(needed) * time
    return row


def _common_accuracy(runs: pd.DataFrame) -> float | None:
    """The accuracy, in whole per cent, that every run that is ok has reached."""
    best = runs[runs["status"] == "ok"]["best_val_accuracy"].dropna()
    common = math.floor(100 * float(best.min()) + 1e-9) / 100 if len(best) else 0.0
    return common or None


def _epochs_to(epochs: pd.DataFrame, target: float | None) -> dict[str, float]:
    """By run_id: the epochs it took to the target; without the runs that did not reach it."""
    if target is None:
        return {}
    there = epochs[(epochs["val_accuracy"] >= target).fillna(False)]
    first = there.dropna(subset=["epoch"]).groupby("run_id")["epoch"].min()
    return {str(run_id): float(epoch) + 1 for run_id, epoch in first.items()}


def _tell_apart(rows: list[Row]) -> None:
    """Name for each row the others that its interval does not tell it from."""
    by_size: dict[tuple[Any, ...], list[Row]] = {}
    by_series: dict[Any, list[Row]] = {}
    for row in rows:
        by_size.setdefault((row["scaling"], row["nodes"], row["ranks_per_node"]), []).append(row)
        by_series.setdefault(row["series"], []).append(row)
    for row in rows:
        same = by_size[row["scaling"], row["nodes"], row["ranks_per_node"]]
        names = _overlapping(row, same, lambda other: str(other["series"]))
        line = by_series[row["series"]]
        before = [r for r in line if (r["world_size"] or 0) < (row["world_size"] or 0)][-1:]
        names += _overlapping(row, before, lambda other: f"{other['world_size']} ranks")
        row["not_distinguishable_from"] = "; ".join(names) or None


def _overlapping(row: Row, others: Iterable[Row], say: Callable[[Row], str]) -> list[str]:
    """Those of the others whose interval of the rate overlaps the row's."""
    low, high = row.get("images_per_s_low"), row.get("images_per_s_high")
    return [
        say(other)
        for other in others
        if other is not row
        and low is not None
        and other.get("images_per_s_low") is not None
        and low <= other["images_per_s_high"]
        and other["images_per_s_low"] <= high
    ]


def shape(size: Size) -> str:
    """How many ranks, and on how many nodes, in words."""
    ranks = f"{size.world_size} rank{'' if size.world_size == 1 else 's'}"
    return f"{ranks} on {size.nodes} nodes" if (size.nodes or 1) > 1 else ranks
