"""Speed-up, efficiency and cost of every series at every size, with their intervals: scaling.csv.

Pure functions of data frames. The baseline of a series is its smallest measured size: the same
strategy and the same settings. With X(N) the training images per second on N ranks and B the
baseline's ranks

    speed-up    S(N) = X(N) / X(B)          strong: the same as t(B) / t(N)
    efficiency  E(N) = S(N) x B / N         weak: of the scaled speed-up (Gustafson, CACM 31, 1988)

Strong and weak scaling are different series and never share a baseline.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from statistics import median

import pandas as pd

from jobkit.analysis.scaling import spread
from jobkit.analysis.scaling.sizes import EPOCH, Size, sizes
from jobkit.analysis.scaling.spread import Pool
from jobkit.analysis.tables.columns import SCALING
from jobkit.analysis.tables.frames import Row, frame
from jobkit.analysis.tables.text import counted

RULE = "the same strategy and settings at the smallest measured size"
_J_OF_KWH = 3.6e6
_UNMEASURED = "no run that is ok measured it"


def measured_sizes(
    runs: pd.DataFrame, epochs: pd.DataFrame, accuracy: float | None = None
) -> list[Size]:
    """Every size of every series, compared with its baseline, with intervals and costs.

    accuracy: the validation accuracy to be reached; None: what every run that is ok has reached.
    """
    found = sizes(runs)
    pool = spread.pool([s.rates for s in found])
    flags = spread.outliers([s.rates for s in found])
    bases: dict[str, Size] = {}
    for one in found:
        if one.speed_up is not None:  # small sizes come first
            bases.setdefault(one.series, one)
    target = _common_accuracy(runs) if accuracy is None else accuracy
    reached = _epochs_to(epochs, target)
    made = []
    for one, wrong in zip(found, flags, strict=True):
        row = {"outliers": ", ".join(compress(one.rated_runs, wrong)) or None}
        row |= _measured(one, bases.get(one.series), pool) | _cost(one, target, reached)
        made.append(_finite(one, row))
    return [replace(s, not_distinguishable_from=_alike(s, made, pool) or None) for s in made]


def scaling_table(found: Sequence[Size], study: str | None) -> pd.DataFrame:
    """A row for each size, with the columns SCALING."""
    rows = [vars(s) | {"study": study, "note": s.note or _missing(s)} for s in found]
    names = {c.name for c in SCALING}
    return frame([{k: v for k, v in row.items() if k in names} for row in rows], SCALING)


def _missing(size: Size) -> str | None:
    return _UNMEASURED if size.throughput is None else None


def _finite(size: Size, more: Row) -> Size:
    """The size with more values, without numbers out of range: rates come from logs."""
    values = vars(size) | more
    lost = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
    return replace(size, **more | dict.fromkeys(lost))


def _measured(size: Size, base: Size | None, pool: Pool | None) -> Row:
    """The intervals of a size, and how it compares with the baseline."""
    row, rates = Row(), _positive(size)
    if pool and rates and size.throughput:
        count = f"{len(rates)} repeats" if len(rates) > 1 else "1 run"
        row["spread_from"] = f"{count}, spread pooled over {counted(pool.sizes, 'size')}"
        row["confidence_share"] = spread.CONFIDENCE
        factor = math.exp(pool.half_width(rates))
        low, high = size.throughput / factor, size.throughput * factor
        row |= {"throughput_low": low, "throughput_high": high}
        if size.time_amount:
            row["time_low_s"] = size.time_amount / high
            row["time_high_s"] = size.time_amount / low
    if base and size.speed_up is not None:
        row |= _compared(size, base, pool)
    return row


def _compared(size: Size, base: Size, pool: Pool | None) -> Row:
    """The intervals of speed-up and efficiency; both ends are the value at the baseline itself."""
    assert size.devices and base.devices and size.speed_up is not None
    row: Row = {"baseline": f"{base.series} at {shape(base)}: {RULE}"}
    if size is base:
        low = high = 1.0
    elif pool is None or not (_positive(size) and _positive(base)):
        return row
    else:
        factor = math.exp(pool.half_width(_positive(size), _positive(base)))
        low, high = size.speed_up / factor, size.speed_up * factor
    share = base.devices / size.devices
    row |= {"speed_up_low": low, "speed_up_high": high}
    return row | {"efficiency_low": low * share, "efficiency_high": high * share}


def _positive(size: Size) -> tuple[float, ...]:
    """The rates of the repeats, which come from logs: none where one has no logarithm."""
    return size.rates if all(0 < rate < math.inf for rate in size.rates) else ()


def _cost(size: Size, target: float | None, reached: dict[str, float]) -> Row:
    """What an epoch costs, and how long it takes to the target accuracy."""
    row: Row = {"target_accuracy": target}
    time, devices = size.time_s, size.devices
    if size.throughput is not None and devices:
        row["throughput_per_rank"] = size.throughput / devices
    if time is None or not devices:
        return row
    row["gpu_hours"] = time * devices / 3600
    row["node_hours"] = time * (size.nodes or 1) / 3600
    per = size.joules_per_work
    if per is not None and size.time_amount and not size.throughput_unit.endswith("/h"):
        row["energy_kwh"] = per * size.time_amount / _J_OF_KWH
    needed = [reached[r] for r in size.ok_runs if r in reached]
    if needed and len(needed) == size.runs_ok:
        row["epochs_to_accuracy"] = median(needed)
        if size.time_of != EPOCH:
            return row  # its time and energy are of a run or of an amount of work
        row["time_to_accuracy_s"] = median(needed) * time
        if "energy_kwh" in row:
            row["kwh_to_accuracy"] = median(needed) * row["energy_kwh"]
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


def _alike(size: Size, found: Sequence[Size], pool: Pool | None) -> str:
    """The series at the same size, and the size before in the series, that may be as fast.

    Without any repeats in the study, all of them: nothing says that they differ.
    """
    same = [s for s in found if comparable_at(s) == comparable_at(size) and s is not size]
    smaller = [
        s for s in found if s.series == size.series and (s.world_size or 0) < (size.world_size or 0)
    ]
    names = [s.series for s in same if alike(size, s, pool)]
    before = [s for s in smaller[-1:] if alike(size, s, pool)]
    return "; ".join([*names, *(counted(s.world_size or 0, "rank") for s in before)])


def comparable_at(size: Size) -> tuple[object, ...]:
    """What two series must share at a size for their rates to be compared."""
    return (size.scaling, size.throughput_unit, size.nodes, size.ranks_per_node)


def alike(one: Size, other: Size, pool: Pool | None) -> bool:
    """Whether both were measured and no test says that they differ."""
    rates = _positive(one), _positive(other)
    return all(rates) and not (pool and pool.differ(*rates))


def shape(size: Size) -> str:
    """How many ranks, and on how many nodes, in words."""
    ranks = counted(size.world_size or 0, "rank")
    return f"{ranks} on {size.nodes} nodes" if (size.nodes or 1) > 1 else ranks
