"""Speed-up, efficiency and cost of every series at every size, with their intervals: scaling.csv.

Pure functions of data frames. With X(N) the rate on N ranks, and B the ranks of the base

    speed-up             S(N) = X(N) / X(B)       strong: the same as t(B) / t(N)
    parallel efficiency  E(N) = S(N) x B / N      weak: of the scaled speed-up
                                                  (Gustafson, CACM 31, 1988)

The base is the smallest measured size of the series. Where another strategy is faster on one rank
than it, beyond chance, or where the series has no run on one rank, it is the fastest serial run of
the same problem (Hoefler and Belli, SC15, rule 1); single's where another may be faster by chance.
Strong and weak scaling never share a base.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean, median
from typing import Any

import pandas as pd

from jobkit.analysis.scaling import spread
from jobkit.analysis.scaling.sizes import EPOCH, Size, sizes, where
from jobkit.analysis.scaling.spread import Pool, Sample
from jobkit.analysis.tables.columns import SCALING
from jobkit.analysis.tables.frames import Row, frame
from jobkit.analysis.tables.series import SAME, faults
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError
from jobkit.spec.runspec import ONE_RANK, STRATEGIES

OWN_BASE = "the same strategy and settings at the smallest measured size"
SERIAL_BASE = "the serial run of the study"
FASTER = 1.05  # without repeats a serial run counts as faster by this factor
_UNMEASURED = "no run that is ok measured it"


def measured_sizes(
    runs: pd.DataFrame, epochs: pd.DataFrame, accuracy: float | None = None
) -> list[Size]:
    """Every size of every series, compared with its base, with intervals and costs.

    accuracy: the validation accuracy to be reached; None: what every run that is ok has reached, in
    whole per cent.
    """
    measured = sizes(runs)
    pool = spread_of(measured)
    bad = faults(runs)
    bases = _bases(measured, runs[~runs["series"].isin(bad)], pool)
    if accuracy is None:
        best = runs.loc[runs["status"] == "ok", "best_val_accuracy"].dropna()
        accuracy = math.floor(100 * float(best.min()) + 1e-9) / 100 if len(best) else None
    reached = _epochs_to(epochs, accuracy)
    filled = []
    for size, wrong in zip(measured, spread.outliers([s.rates for s in measured]), strict=True):
        row: Row = {"outliers": ", ".join(compress(size.rated_runs, wrong)) or None}
        if size.series in bad:
            row["note"] = f"not compared: {bad[size.series]}"
        base = bases.get(size.series) if size.series not in bad else None
        row |= _compared(size, base, pool) | _cost(size)
        row["target_accuracy"] = accuracy or None
        needed = [reached[r] for r in size.ok_runs if r in reached]
        if needed and len(needed) == size.runs_ok:
            row["epochs_to_accuracy"] = median(needed)
            if size.time_of == EPOCH and "mean_time_s" in row:  # else it is of no epoch
                row["time_to_accuracy_s"] = fmean(needed) * row["mean_time_s"]
        filled.append(replace(size, **row))
    return filled


def spread_of(measured: Sequence[Size]) -> Pool | None:
    """The spread of the runs of a study; None without repeats."""
    return spread.pool([sample_of(s) for s in measured])


def sample_of(size: Size) -> Sample:
    """The rates of the repeats, which come from logs: none where one has no logarithm."""
    return size.rates if all(rate > 0 for rate in size.rates) else (), size.world_size or 1


def scaling_table(measured: Sequence[Size], study: str | None) -> pd.DataFrame:
    """A row for each size, with the columns SCALING."""
    rows = []
    for size in measured:
        note = size.note or (_UNMEASURED if size.throughput is None else None)
        known = {c.name: getattr(size, c.name) for c in SCALING if c.name != "study"}
        rows.append(known | {"study": study, "note": note})
    return frame(rows, SCALING)


def _bases(measured: Sequence[Size], runs: pd.DataFrame, pool: Pool | None) -> dict[str, Size]:
    """By series: the size that speed-up and efficiency are relative to."""
    own: dict[str, Size] = {}
    for size in measured:  # small sizes come first
        if size.throughput and size.world_size and size.devices:
            own.setdefault(size.series, size)
    ok = runs[(runs["status"] == "ok") & runs["strategy"].isin(STRATEGIES)]
    ok = ok[ok["series"].isin(list(own))]
    problems: dict[str, tuple[Any, ...]] = {}
    serial = defaultdict[tuple[Any, ...], list[Size]](list)
    for series, group in ok.groupby("series"):
        if group["global_batch_size"].notna().all():
            # What a serial run must share to be the base of a series of jobkit's own training.
            weak = (group["scaling"] == "weak").any()
            batch = "batch_size_per_rank" if weak else "global_batch_size"
            largest = (str(group[n].max()) for n in (batch, "threads_used", "train_samples"))
            key = (*(str(group[n].iloc[0]) for n in (*SAME, "scaling")), *largest)
            problems[str(series)] = key
            if own[str(series)].world_size == own[str(series)].devices == 1:
                serial[key].append(own[str(series)])
    busy = ok["other_load_mean"].gt(spread.MAX_OTHER_LOAD).fillna(False).any()

    def sure(size: Size, other: Size) -> bool:
        """Whether it is surely faster; no single run is where other programs took part."""
        return surely_faster(size, other, pool) and not (busy and pool is None)

    bases = dict(own)
    for series, key in problems.items():
        small = own[series]
        alone = serial[key] or [small]
        best = max(alone, key=lambda s: s.throughput or 0)
        best = next((s for s in alone if is_single(s) and not sure(best, s)), best)
        if best.series != series and (small not in alone or sure(best, small)):
            bases[series] = best
    return bases


def is_single(size: Size) -> bool:
    """Whether it is the serial program, without any parallel part."""
    return size.strategy == "single" and size.world_size == size.devices == 1


def surely_faster(size: Size, other: Size, pool: Pool | None) -> bool:
    """Whether a size is faster than another one beyond chance; without repeats, by 5 %."""
    if pool and sample_of(size)[0] and sample_of(other)[0]:
        certain = pool.differ(sample_of(size), sample_of(other))
        return certain and (size.throughput or 0) > (other.throughput or 0)
    return (size.throughput or 0) > FASTER * (other.throughput or 0)


def _compared(size: Size, base: Size | None, pool: Pool | None) -> Row:
    """The intervals of a size, and how it compares with the base."""
    row, own = Row(), sample_of(size)
    if pool and own[0] and size.throughput:
        count = f"{len(own[0])} repeats" if len(own[0]) > 1 else "1 run"
        row["spread_from"] = f"{count}, spread pooled over {counted(pool.sizes, 'size')}"
        factor = math.exp(pool.half_width(own))
        low, high = size.throughput / factor, size.throughput * factor
        row |= {"throughput_low": low, "throughput_high": high}
        if amount := size.time_amount:
            row |= {"time_low_s": amount / high, "time_high_s": amount / low}
    if not (base and base.throughput and size.throughput and size.devices and base.devices):
        return row
    rule = OWN_BASE if base.series == size.series else SERIAL_BASE
    speed_up, share = size.throughput / base.throughput, base.devices / size.devices
    row["baseline"] = f"{base.series} at {where(base, 'ranks')}: {rule}"
    row |= {"base_series": base.series, "base_world_size": base.world_size, "speed_up": speed_up}
    # Whole numbers are multiplied first: 2400 of 3 x 1000 is 0.8, and not a bit less.
    row["efficiency"] = size.throughput * base.devices / (base.throughput * size.devices)
    factor = 1.0  # both ends are the value at the base itself
    if size is not base:
        if not (pool and own[0] and sample_of(base)[0]):
            return row
        factor = math.exp(pool.half_width(own, sample_of(base)))
    low, high = speed_up / factor, speed_up * factor
    row |= {"speed_up_low": low, "speed_up_high": high}
    return row | {"efficiency_low": low * share, "efficiency_high": high * share}


def _cost(size: Size) -> Row:
    """What an epoch costs, by the mean over the repeats."""
    row, devices = Row(), size.devices
    if size.throughput is not None and devices:
        row["throughput_per_rank"] = size.throughput / devices
    if size.time_s is None or not devices:
        return row
    row["mean_time_s"] = mean = fmean(size.times_s)
    row["gpu_hours"] = mean * devices / 3600
    if size.nodes:
        row["node_hours"] = mean * size.nodes / 3600
    per = size.joules_per_work
    if per is not None and size.time_amount and not size.throughput_unit.endswith("/h"):
        row["energy_kwh"] = per * size.time_amount / 3.6e6  # joules
    return row


def _epochs_to(epochs: pd.DataFrame, target: float | None) -> dict[Any, float]:
    """By run_id: the epochs, from 0 or 1, to the target; without runs that did not reach it."""
    if not target:
        return {}
    from_1 = epochs.groupby("series", dropna=False)["epoch"].transform("min").eq(1)
    there = epochs.assign(count=epochs["epoch"] + (~from_1).astype("Int64"))
    there = there[(epochs["val_accuracy"] >= target).fillna(False)].dropna(subset=["count"])
    return there.groupby("run_id")["count"].min().astype(float).to_dict()


def kind_of(size: Size) -> tuple[str, str, str]:
    """What sizes share whose rates are compared: scaling and unit, in words; model; data."""
    scaling = f"{size.scaling or 'unstated'} scaling in {size.throughput_unit}"
    return scaling, size.model or "", size.dataset or ""


def comparable_at(size: Size) -> tuple[object, ...]:
    """What two series must share at a size for their rates to be compared."""
    return kind_of(size), size.nodes, size.ranks_per_node


def check_efficiency(
    measured: Sequence[Size], least: float, at: int
) -> tuple[list[str], list[str]]:
    """A line for each series that is below an efficiency at that many ranks, and that may be.

    It is below where the whole interval is, or the one value where there are no repeats. A series
    with no efficiency there does not pass: it was not measured, or it is its own base. Raises
    UsageError where nothing was planned at that size.
    """
    at_size = [s for s in measured if s.world_size == at]
    if not at_size:
        known = ", ".join(map(str, sorted({s.world_size for s in measured if s.world_size})))
        raise UsageError(f"--at {at}: the study has no such size (it has: {known or 'none'})")
    missed, unsure = list[str](), list[str]()
    for size in at_size:
        place, value = f"{size.series} at {where(size, 'ranks')}", size.efficiency
        if value is None or size.is_base:
            why = "no smaller size was measured to compare with"
            missed.append(f"{place}: no efficiency: {why if value else size.note or _UNMEASURED}")
            continue
        ends = size.interval("efficiency")
        low, high = ends or (value, value)
        text = f"{place}: efficiency {value:.1%}"
        text += f" [{low:.1%}, {high:.1%} at 95%]" if ends else ""
        base = f"(relative to {size.base_series} on {counted(size.base_world_size or 0, 'rank')})"
        if high < least:
            missed.append(f"{text} is below {least:.1%} {base}")
        elif low < least:
            unsure.append(f"{text} may be below {least:.1%}: repeat")
    several = {s.series for s in measured if s.strategy not in ONE_RANK}
    absent = sorted(several - {s.series for s in at_size})
    missed += [f"{name}: not planned at {counted(at, 'rank')}" for name in absent]
    return missed, unsure
