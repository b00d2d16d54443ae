"""Speed-up, efficiency and cost of every series at every size, with their intervals: scaling.csv.

Pure functions of data frames. The baseline of a series is its smallest measured size: the same
strategy and the same settings. With X(N) the training images per second on N ranks and B the
baseline's ranks

    speed-up    S(N) = X(N) / X(B)          strong: the same as t(B) / t(N)
    efficiency  E(N) = S(N) x B / N         weak: of the scaled speed-up (Gustafson, CACM 31, 1988)

Strong and weak scaling are different series and never share a baseline.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pandas as pd

from jobkit.analysis.scaling import spread
from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.analysis.tables.columns import SCALING
from jobkit.analysis.tables.frames import Row, frame
from jobkit.analysis.tables.text import counted

RULE = "the same strategy and settings at the smallest measured size"
_UNMEASURED = "no run that is ok measured it"


@dataclass(frozen=True)
class _Spread:
    """A size with the spread of its rate."""

    size: Size
    origin: str  # what the values are
    count: int  # values
    samples: spread.Values | None  # resampled medians of images_per_s


def measured_sizes(
    runs: pd.DataFrame, epochs: pd.DataFrame, accuracy: float | None = None, seed: int = 0
) -> list[Size]:
    """Every size of every series, compared with its baseline, with intervals and costs.

    accuracy: the validation accuracy to be reached; None: what every run that is ok has reached.
    """
    found = [_spread(s, epochs, seed) for s in sizes(runs)]
    bases: dict[str, _Spread] = {}
    for one in found:
        if one.size.speed_up is not None:  # small sizes come first
            bases.setdefault(one.size.series, one)
    target = _common_accuracy(runs) if accuracy is None else accuracy
    reached = _epochs_to(epochs, target)
    made = [
        _finite(
            one.size, _measured(one, bases.get(one.size.series)) | _cost(one.size, target, reached)
        )
        for one in found
    ]
    return [replace(s, not_distinguishable_from=_overlaps(s, made) or None) for s in made]


def scaling_table(found: Sequence[Size], study: str | None) -> pd.DataFrame:
    """A row for each size, with the columns SCALING."""
    rows = [vars(s) | {"study": study, "note": s.note or _missing(s)} for s in found]
    names = {c.name for c in SCALING}
    return frame([{k: v for k, v in row.items() if k in names} for row in rows], SCALING)


def _missing(size: Size) -> str | None:
    return _UNMEASURED if size.images_per_s is None else None


def _finite(size: Size, more: Row) -> Size:
    """The size with more values, without numbers out of range: rates come from logs."""
    values = vars(size) | more
    lost = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
    return replace(size, **more | dict.fromkeys(lost))


def _spread(size: Size, epochs: pd.DataFrame, seed: int) -> _Spread:
    """The spread of a size: over its repeats; over the epochs of the run where there is one."""
    values, origin = list(size.rates), f"{len(size.rates)} repeats"
    if len(values) == 1:
        values = _rates_of_epochs(epochs[epochs["run_id"] == size.ok_runs[0]])
        origin = f"{len(values)} epochs of one run"
    label = f"{size.series} {size.nodes}x{size.ranks_per_node}"
    samples = spread.medians(values, label, seed)
    return _Spread(size, origin if samples is not None else "", len(values), samples)


def _rates_of_epochs(epochs: pd.DataFrame) -> list[float]:
    """The rates of a run's epochs, without the first of an attempt where there are others."""
    timed = epochs.dropna(subset=["images_per_s"])
    begun = epochs.groupby("attempt", dropna=False)["epoch"].transform("min")
    first = timed["epoch"] == begun[timed.index]
    later = timed[~first.fillna(False)]
    return [float(v) for v in (later if len(later) else timed)["images_per_s"]]


def _measured(one: _Spread, base: _Spread | None) -> Row:
    """The intervals of a size, and how it compares with the baseline."""
    size, row = one.size, Row()
    flags = zip(size.ok_runs, spread.outliers(size.rates), strict=False)
    row["outliers"] = ", ".join(run_id for run_id, wrong in flags if wrong) or None
    if one.samples is not None:
        row |= {"spread_from": one.origin, "confidence_share": spread.confidence(one.count)}
        low, high = spread.interval(one.samples)
        row |= {"images_per_s_low": low, "images_per_s_high": high}
        if size.train_samples:
            row["time_per_epoch_low_s"] = size.train_samples / high
            row["time_per_epoch_high_s"] = size.train_samples / low
    if base and size.speed_up is not None:
        row |= _compared(one, base)
    return row


def _compared(one: _Spread, base: _Spread) -> Row:
    """The intervals of speed-up and efficiency; both ends are the value at the baseline itself."""
    own, other = one.size, base.size
    assert own.devices and other.devices
    row: Row = {"baseline": f"{other.series} at {shape(other)}: {RULE}"}
    if one is base:
        ends = (1.0, 1.0)
    elif one.samples is None or base.samples is None:
        return row
    else:
        ends = spread.interval(one.samples / base.samples)
        if one.origin != base.origin:
            row["spread_from"] = f"{one.origin} (baseline: {base.origin})"
        row["confidence_share"] = spread.confidence(min(one.count, base.count))
    share = other.devices / own.devices
    row |= {"speed_up_low": ends[0], "speed_up_high": ends[1]}
    return row | {"efficiency_low": ends[0] * share, "efficiency_high": ends[1] * share}


def _cost(size: Size, target: float | None, reached: dict[str, float]) -> Row:
    """What an epoch costs, and how long it takes to the target accuracy."""
    row: Row = {"target_accuracy": target}
    time, devices = size.time_per_epoch_s, size.devices
    if size.images_per_s is not None and devices:
        row["images_per_s_per_rank"] = size.images_per_s / devices
    if time is None or not devices:
        return row
    row["gpu_hours_per_epoch"] = time * devices / 3600
    row["node_hours_per_epoch"] = time * (size.nodes or 1) / 3600
    needed = [reached[r] for r in size.ok_runs if r in reached]
    if needed and len(needed) == size.runs_ok:
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


def _overlaps(size: Size, found: Sequence[Size]) -> str:
    """The series at the same size, and the size before in the series, whose interval overlaps."""
    place = (size.scaling, size.nodes, size.ranks_per_node)
    same = [s for s in found if (s.scaling, s.nodes, s.ranks_per_node) == place]
    names = _overlapping(size, same, lambda other: other.series)
    smaller = [
        s for s in found if s.series == size.series and (s.world_size or 0) < (size.world_size or 0)
    ]
    names += _overlapping(size, smaller[-1:], lambda other: counted(other.world_size or 0, "rank"))
    return "; ".join(names)


def _overlapping(size: Size, others: Iterable[Size], say: Callable[[Size], str]) -> list[str]:
    """Those of the others whose interval of the rate overlaps the size's."""
    low, high = size.images_per_s_low, size.images_per_s_high
    return [
        say(other)
        for other in others
        if other is not size
        and low is not None
        and high is not None
        and other.images_per_s_low is not None
        and other.images_per_s_high is not None
        and low <= other.images_per_s_high
        and other.images_per_s_low <= high
    ]


def shape(size: Size) -> str:
    """How many ranks, and on how many nodes, in words."""
    ranks = counted(size.world_size or 0, "rank")
    return f"{ranks} on {size.nodes} nodes" if (size.nodes or 1) > 1 else ranks
