"""Each series at each size: medians and range over the repeats, and what their time is of.

Only successful runs enter a median: a run without its end may have measured only a part.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pandas as pd

from jobkit.analysis.tables.frames import Row, records
from jobkit.analysis.tables.text import counted
from jobkit.spec.runspec import STRATEGIES

IMAGES = "images/s"  # the unit of a training on images, which is jobkit's own
RUNS = "runs/h"  # of a command of which nothing else is known
EPOCH = "epoch"
_OF_RUNS = {"runs": "run", "shares": "one rank's share of a run"}
_KEYS = ["series", "world_size", "nodes", "ranks_per_node"]
_FACTS = ("strategy", "scaling", "global_batch_size", "batch_size_per_rank", "model", "dataset")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One series at one size: a row of scaling.csv, by the names of its columns, and its repeats.

    None: no run that is ok says it. What compares sizes is filled in by scaling.measured_sizes.
    """

    series: str
    strategy: str | None
    scaling: str | None
    nodes: int | None
    ranks_per_node: int | None
    world_size: int | None
    devices: int | None  # GPUs that compute: more than world_size with dp
    runs_planned: int
    runs_ok: int
    ok_runs: tuple[str, ...]  # run_ids
    not_ok: tuple[str, ...]  # the statuses of the others
    global_batch_size: int | None
    batch_size_per_rank: int | None
    train_samples: int | None
    throughput_unit: str  # of the rate: images/s, tokens/s, steps/s
    throughput: float | None  # median, then every repeat
    rates: tuple[float, ...]
    rated_runs: tuple[str, ...]  # run_ids, one for each of rates: a run may be ok without a rate
    peak_memory_mib: float | None  # median, then every repeat
    peaks_memory_mib: tuple[float, ...]
    val_accuracy: float | None
    model: str | None = None
    dataset: str | None = None
    time_of: str = EPOCH  # what the time is of: epoch, run, or an amount of work, as 10M tokens
    time_amount: float | None = None  # that in units of work: time_s = time_amount / throughput
    time_s: float | None = None
    times_s: tuple[float, ...] = ()  # of every repeat
    gpu_busy: float | None = None  # median of the runs' means
    step_time_s: float | None = None  # median, of one optimizer step
    # Compared with the base: see scaling.py.
    baseline: str | None = None
    base_series: str | None = None
    base_world_size: int | None = None
    speed_up: float | None = None  # rate / rate at the base
    efficiency: float | None = None  # speed-up / (devices / those of the base)
    note: str | None = None  # why it is not compared, where its runs must not be
    # Intervals, where there are two values or more.
    throughput_low: float | None = None
    throughput_high: float | None = None
    time_low_s: float | None = None
    time_high_s: float | None = None
    speed_up_low: float | None = None
    speed_up_high: float | None = None
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    spread_from: str | None = None
    outliers: str | None = None
    # What an epoch costs, by the mean, and the time to an accuracy.
    throughput_per_rank: float | None = None
    mean_time_s: float | None = None
    gpu_hours: float | None = None
    node_hours: float | None = None
    target_accuracy: float | None = None
    epochs_to_accuracy: float | None = None
    time_to_accuracy_s: float | None = None
    # Energy, where it was measured alike in all its runs.
    joules_per_work: float | None = None
    joules_of: str | None = None
    energy_kwh: float | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """Series, ranks and nodes."""
        return self.series, self.world_size or 0, self.nodes or 1

    @property
    def is_base(self) -> bool:
        """Whether speed-up and efficiency are relative to this size itself."""
        own = self.series == self.base_series and self.world_size == self.base_world_size
        return own and self.speed_up == 1

    def interval(self, name: str) -> tuple[float, float] | None:
        """The ends of the interval of a value; None where it has none."""
        stem, unit, _ = name.partition("_s")  # time_low_s
        low, high = (getattr(self, f"{stem}_{end}{unit}", None) for end in ("low", "high"))
        return None if low is None or high is None else (low, high)


_OF_RUN = (
    *("run_id", "status", "devices", "train_samples", "throughput_unit", "throughput"),
    *("peak_memory_mib", "val_accuracy", "joules_per_work", "joules_of"),
    *("step_time_s", "gpu_busy_mean"),
)


def sizes(runs: pd.DataFrame) -> list[Size]:
    """Medians over the repeats of every size, series by series, small sizes first.

    Series are in the order of their strategies, and few nodes come first.
    """
    # A run has hundreds of columns, and there may be many sizes: plain values cost least.
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in records(runs[[*_KEYS, *_FACTS, *_OF_RUN]]):
        groups.setdefault(tuple(row[k] for k in _KEYS), []).append(row)
    measured = _with_times([_size(rows) for rows in groups.values()])
    order = {name: place for place, name in enumerate(STRATEGIES)}
    return sorted(measured, key=lambda s: (order.get(s.strategy or "", len(order)), *s.place))


def where(size: Size, unit: str) -> str:
    """How many GPUs or ranks and, where there are several nodes, on how many.

    unit: GPUs, of which dp has several on one rank, or ranks.
    """
    count = size.world_size if unit == "ranks" else size.devices
    if not (count := count or size.world_size):
        return "an unknown number of ranks"
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    return f"{counted(count, unit[:-1])}{on}"


def numbers_of(rows: Iterable[Row], name: str) -> tuple[float, ...]:
    """The numbers of a column, without empty cells."""
    return tuple(float(value) for row in rows if (value := row.get(name)) is not None)


def median_of(rows: Iterable[Row], name: str) -> float | None:
    """The median of a column; None where it is empty."""
    numbers = numbers_of(rows, name)
    return median(numbers) if numbers else None


def time_of(sizes: Sequence[Size]) -> str:
    """What the time of all these sizes is of."""
    names = {s.time_of for s in sizes}
    return names.pop() if len(names) == 1 else "amount of work"


def fewest_nodes(sizes: Sequence[Size], series: str) -> list[Size]:
    """The sizes of a series; of those with as many ranks, the one on the fewest nodes."""
    line: dict[int, Size] = {}
    for size in sizes:  # few nodes come first
        if size.series == series:
            line.setdefault(size.world_size or 0, size)
    return list(line.values())


def _size(rows: list[Row]) -> Size:
    first, ok = rows[0], [row for row in rows if row["status"] == "ok"]
    scopes = {row["joules_of"] for row in ok}
    joules_of = scopes.pop() if len(scopes) == 1 else None
    return Size(
        **{name: first[name] for name in (*_KEYS, *_FACTS)},
        devices=max((row["devices"] or 0 for row in ok), default=0) or first["world_size"],
        runs_planned=len(rows),
        runs_ok=len(ok),
        ok_runs=tuple(row["run_id"] for row in ok),
        not_ok=tuple(row["status"] for row in rows if row["status"] != "ok"),
        train_samples=next((n for row in ok if (n := row["train_samples"])), None),
        throughput_unit=next((unit for row in ok if (unit := row["throughput_unit"])), ""),
        throughput=median_of(ok, "throughput"),
        rates=numbers_of(ok, "throughput"),
        rated_runs=tuple(row["run_id"] for row in ok if row["throughput"] is not None),
        peak_memory_mib=median_of(ok, "peak_memory_mib"),
        peaks_memory_mib=numbers_of(ok, "peak_memory_mib"),
        val_accuracy=median_of(ok, "val_accuracy"),
        gpu_busy=median_of(ok, "gpu_busy_mean"),
        step_time_s=median_of(ok, "step_time_s"),
        joules_per_work=median_of(ok, "joules_per_work") if joules_of else None,
        joules_of=joules_of,
    )


def _with_times(measured: list[Size]) -> list[Size]:
    """Give the sizes of one unit the time of the same: an epoch, a run or an amount of work.

    The unit of a size of which no run is ok is that of its series, else that of the study. A study
    that measured nothing has images where it is jobkit's own training, else runs.
    """
    of_series = {s.series: s.throughput_unit for s in measured if s.throughput_unit}
    units = set(of_series.values())
    own = any(s.strategy in STRATEGIES and s.global_batch_size for s in measured)
    other = units.pop() if len(units) == 1 else IMAGES if own or units else RUNS
    by_unit = defaultdict[str, list[Size]](list)
    for size in measured:
        by_unit[size.throughput_unit or of_series.get(size.series, other)].append(size)
    found = []
    for unit, alike in by_unit.items():
        fastest = max((x for size in alike for x in size.rates if x > 0), default=None)
        # Only jobkit's own training says the samples of an epoch.
        epochs = unit == IMAGES and (fastest is None or any(size.train_samples for size in alike))
        work, name = (None, EPOCH) if epochs else _work(unit, fastest or 1.0)
        for size in alike:
            amount = size.train_samples if epochs else work
            times = tuple(amount / rate for rate in size.rates if amount and rate > 0)
            # That of the median rate: speed-ups are ratios of both.
            middle = amount / x if amount and (x := size.throughput or 0.0) > 0 else None
            time: Any = {"time_of": name, "times_s": times, "time_s": middle}
            found.append(replace(size, throughput_unit=unit, time_amount=amount, **time))
    return found


def _work(unit: str, fastest: float) -> tuple[float, str]:
    """An amount of work, so that amount / rate is in seconds, and what it is called.

    It is a power of ten, the same for all sizes of a unit: the fastest takes up to 1 s.
    """
    name, _, per = unit.partition("/")
    if per == "h":  # the wall time of the run is all that is known
        return 3600.0, _OF_RUNS.get(name, name)
    amount = 10.0 ** math.ceil(math.log10(fastest))
    text = f"{amount:,.0f}" if amount >= 1 else f"{amount:g}"
    for least, mark in ((1e6, "M"), (1e9, "G")):
        text = f"{amount / least:,.0f}{mark}" if amount >= least else text
    return amount, f"{text} {name.removesuffix('s') if amount == 1 else name}"
