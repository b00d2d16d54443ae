"""Which measured losses explain an efficiency, and what differs between two sizes.

A cause is named only where the losses that were measured multiply to the efficiency that the clock
shows, within its interval. Else the share of the loss that they do not explain is said.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling import pop
from jobkit.analysis.scaling.pop import Breakdown, Efficiencies, Step
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.frames import Row
from jobkit.analysis.tables.text import TextTable

_PREFIX = "breakdown_"  # begins the names of the columns of a breakdown
_MIN_TOLERANCE, _TOLERANCE = 0.02, 0.1  # of the logarithm of an efficiency, and of its loss
_NAMED = 1 / 3  # of the loss: a factor with less is not named
_ANOTHER_DAY_S = 12 * 3600
_HEADS = (
    *("load balance", "random balance", "communication efficiency", "data wait factor"),
    *("useful share", "computation scalability", "global efficiency"),
)
_NOTE = (
    "100% means no loss. Load balance: mean over ranks of the useful time / that of the rank that "
    "is slowest over all iterations. Random balance: that / the mean over iterations of the "
    "maximum (ranks that are slow in turn). Data wait factor: maximum useful time / maximum busy "
    "time (useful time and waiting for batches). Communication efficiency: maximum busy time / "
    "time of the iteration. Useful share: the product of these four. Computation scalability: "
    "useful time per sample, summed over ranks, at the smallest size / at this size. Global "
    "efficiency = useful share x computation scalability: over that of the smallest size it is the "
    "parallel efficiency that was measured, as far as these factors explain it. Model: POP centre "
    "of excellence (pop-coe.eu)."
)
# What may differ between the runs of two sizes, and how it is called.
_DIFFER = {
    "device": "device",
    "driver_version": "driver",
    "git_commit": "commit",
    "gpu_max_clock": "clock",
    "gpu_application_clock": "clock",
    "gpu_power_limit": "power limit",
    "cuda_version": "CUDA",
    "nccl_version": "NCCL",
    "cudnn_version": "cuDNN",
    "python_version": "Python",
}
_BUSY_NODE = 0.3  # by how much the load of the nodes must differ to be named


@dataclass(frozen=True)
class SizeBreakdown:
    """A size with a breakdown of its iterations, and their efficiencies."""

    size: Size
    step: Step
    own: Efficiencies
    base: Efficiencies  # of the smallest size of the series that has a breakdown
    first: Size  # that size
    late: tuple[int | None, str | None] = (None, None)  # the rank or node that comes last


def size_breakdowns(results: Results) -> list[SizeBreakdown]:
    """The sizes with a breakdown record, series by series, small sizes first.

    Of the repeats, the one with the median iteration stands for the size, so that its parts
    belong together. A series whose runs must not be compared is left out.
    """
    breakdowns: list[SizeBreakdown] = []
    firsts: dict[str, tuple[Size, Step]] = {}
    for size in results.sizes:
        times = {run: pop.breakdown(results.rows[run], _PREFIX) for run in size.ok_runs}
        known = [t for t in times.values() if t]
        # Of another program the work of a step follows from what was measured of whole runs.
        work = size.global_batch_size or (size.throughput or 0) * (size.step_time_s or 0)
        if not known or size.note or not size.world_size or not work:
            continue
        middle = _middle(known)
        run_id = next(run for run, t in times.items() if t == middle)
        step = Step(middle, size.world_size, work)
        first, base = firsts.setdefault(size.series, (size, step))
        own, of_base = pop.efficiencies(step, base), pop.efficiencies(base, base)
        row = results.rows[run_id]
        late = row.get("breakdown_late_rank"), row.get("breakdown_late_host")
        breakdowns.append(SizeBreakdown(size, step, own, of_base, first, late))
    return breakdowns


def _middle(times: list[Breakdown]) -> Breakdown:
    """The breakdown with the median iteration, of two the shorter."""
    middle = median_low(t.iteration_s for t in times)
    return next(t for t in times if t.iteration_s == middle)


def efficiency_table(breakdowns: Sequence[SizeBreakdown], unit: str) -> TextTable:
    """The efficiencies of each size, as the report has them. unit: GPUs, or processes (ranks)."""
    heads = ["series", unit, "nodes", "iteration (ms)", *_HEADS]
    rows = []
    for one in breakdowns:
        own = one.own
        factors = [own.load_balance, own.random_balance, own.communication, own.data_wait]
        factors += [own.useful, own.computation, own.overall]
        place = [one.size.series, str(one.size.world_size), str(one.size.nodes)]
        place.append(f"{1000 * one.step.times.iteration_s:.4g}")
        rows.append([*place, *(f"{value:.1%}" for value in factors)])
    return TextTable(heads, rows, 1, [_NOTE])


@dataclass(frozen=True)
class Losses:
    """Factors of a size over those of a smaller one, each with its words; 1: nothing is lost."""

    first: Size  # the smaller one
    factors: dict[str, tuple[float, str]]

    @property
    def explained(self) -> float:
        """The efficiency that they make up together."""
        return math.prod(factor for factor, _ in self.factors.values())


def cause_of(results: Results, size: Size) -> str:
    """Why a size is less efficient than its base, as the end of a sentence; may be empty."""
    if size.efficiency is None or size.efficiency >= 1 or size.is_base:
        return ""
    base = base_of(results, size)
    different = differences(results, size, base) if base else []
    first = next(s for s in results.sizes if s.series == size.series and s.speed_up)
    before = -math.log(first.efficiency or 1)
    total = -math.log(size.efficiency) - before
    if before > _NAMED * (before + max(total, 0)):  # another strategy is faster on one rank
        slower = f"{size.series} on {first.world_size} is {1 - (first.efficiency or 1):.0%} slower"
        return f", because {slower} than {size.base_series}"
    lost = _losses(results, size, first)
    if lost is None:
        return _outside(different, "; what it is lost to was not measured")
    total += before + math.log(lost.first.efficiency or 1)
    known = -math.log(lost.explained)
    ends = size.interval("efficiency")
    half = math.log(ends[1] / ends[0]) / 2 if ends and ends[0] > 0 else 0.0
    gap = total - known
    if abs(gap) <= max(half, _MIN_TOLERANCE, _TOLERANCE * total):
        return _because(lost, known, different)
    if gap < 0:
        words = " and ".join(_named(lost, known))
        text = (
            f"; its profiled steps show {lost.explained:.0%}, as {words}: profile more (--why 20)"
        )
        return _outside(different, text)
    largest = _named(lost, total)
    part = f"{' and '.join(largest)}, but " if largest else ""
    outside = f"; {part}{gap / total:.0%} of the loss is outside of what was measured"
    return _outside(different or ["nothing that is recorded differs"], outside)


def _because(lost: Losses, known: float, different: Sequence[str]) -> str:
    words = _named(lost, known)
    if not words:
        return ""
    factor = lost.factors.get("computation", (1.0, ""))[0]
    grown = factor < 1 and -math.log(factor) >= _NAMED * known
    also = f"; {', '.join(different)}" if grown and different else ""
    return f", because {' and '.join(words)}{also}"


def _named(lost: Losses, total: float) -> list[str]:
    """The words of the factors that make up a third of a loss or more, the largest first."""
    parts = sorted(lost.factors.values())
    return [words for factor, words in parts if factor < 1 and -math.log(factor) >= _NAMED * total]


def _outside(different: Sequence[str], text: str) -> str:
    return f"{text}; {', '.join(different)}" if different else text


def _losses(results: Results, size: Size, first: Size) -> Losses | None:
    """What was measured of a size: the breakdown of its steps, or its wait for data."""
    for one in size_breakdowns(results):
        if one.size == size and one.first != size:
            return _of_breakdown(one)
    ok, before = rows_of(results, size), rows_of(results, first)
    wait, smaller = (median_of(table, "data_wait_share") for table in (ok, before))
    if wait is None or smaller is None or not wait < 1 or not smaller < 1:
        return None
    words = f"waiting for data takes {wait:.0%} of the time"
    return Losses(first, {"data_wait": ((1 - wait) / (1 - smaller), words)})


def _of_breakdown(one: SizeBreakdown) -> Losses:
    own, base, times = one.own, one.base, one.step.times
    wait = (times.busy_max_s - times.useful_max_s) / times.iteration_s
    # The ranks besides the slowest, so that its time is not in what all ranks compute.
    ranks, slowest = one.step.ranks, times.useful_max_s
    others = (ranks * times.useful_s - slowest) / (ranks - 1) if ranks > 1 else slowest
    others = min(others or slowest, slowest)
    uneven = slowest / others
    computation = own.computation * times.useful_s / others
    grown = base.computation / computation - 1
    rank, host = one.late
    late = "the slowest rank" if rank is None else f"rank {rank}"
    late += f" on {host}" if host else ""
    words = {
        "communication": f"exposed communication takes {1 - own.communication:.0%} of the step",
        "random_balance": f"ranks slow in turn take {1 - own.random_balance:.0%} of the step",
        "data_wait": f"waiting for data takes {wait:.0%} of the step",
        "load_balance": f"{late} computes {uneven - 1:.0%} longer than the others",
        "computation": f"computing a sample takes {grown:.0%} more rank-seconds",
    }
    shares = vars(own) | {"load_balance": base.load_balance / uneven, "computation": computation}
    factors = {k: (shares[k] / getattr(base, k), text) for k, text in words.items()}
    return Losses(one.first, factors)


def rows_of(results: Results, size: Size) -> list[Row]:
    """The rows of results.csv of the runs of a size that are ok."""
    return [results.rows[run] for run in size.ok_runs]


def values_of(rows: Sequence[Row], name: str) -> list[str]:
    """The different values of a column, as text."""
    return sorted({str(v) for row in rows if (v := row.get(name)) is not None})


def median_of(rows: Sequence[Row], name: str) -> float | None:
    """The median of a column; None where it is empty."""
    numbers = [float(v) for row in rows if (v := row.get(name)) is not None]
    return median(numbers) if numbers else None


def base_of(results: Results, size: Size | None) -> Size | None:
    """The size that another one is compared with."""
    bases = (s for s in results.sizes if size and s.series == size.base_series and s.is_base)
    return next(bases, None)


def differences(results: Results, size: Size, base: Size) -> list[str]:
    """What the runs of a size have and those of its base have not: device, driver, nodes, day."""
    own, other = rows_of(results, size), rows_of(results, base)
    if not own or not other:
        return []
    different = []
    for name, words in _DIFFER.items():
        here, there = values_of(own, name), values_of(other, name)
        if here and there and not {*here} & {*there}:
            different.append(f"another {words} ({_short(here)}, not {_short(there)})")
    loads = [median_of(table, "cpu_busy_mean") for table in (own, other)]
    on_gpus = "cuda" in values_of(own, "device_type")
    if on_gpus and None not in loads and loads[0] > loads[1] + _BUSY_NODE:  # type: ignore[operator]
        different.append(f"busier nodes (load {loads[0]:.0%}, not {loads[1]:.0%})")
    if not different:
        nodes = [{n for v in values_of(t, "node_list") for n in v.split(",")} for t in (own, other)]
        if all(nodes) and not nodes[0] & nodes[1]:
            different.append("other nodes")
        times = [median_of(table, "start_time_s") for table in (own, other)]
        if None not in times and abs(times[0] - times[1]) > _ANOTHER_DAY_S:  # type: ignore[operator]
            different.append("another time of day or another day")
    return list(dict.fromkeys(different))


def _short(values: Sequence[str]) -> str:
    shown = [v if len(v) < 30 else v[:12] for v in values]
    return " and ".join(shown[:2]) + " and others" * (len(shown) > 2)
