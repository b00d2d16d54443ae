"""Which measured losses explain an efficiency, and what differs between two sizes.

A cause is named only where the losses that were measured multiply to the efficiency that the clock
shows, within its interval. Else the share of the loss that they do not explain is said.

The factors of a step are those of the POP centre of excellence (https://pop-coe.eu/node/69; Rosas,
Gimenez and Labarta, "Scalability prediction for fundamental performance factors", 2014), with the
wait for data as one of its own. In seconds of one iteration, rank i computes u(i), with the host's
time in it, and is busy for b(i), with the wait for data in it; r is how much longer the slowest
rank of each iteration takes, on average, than max u; T is the wall time of the slowest rank:

    load balance              LB = mean u / max u
    random balance            RB = max u / (max u + r)
    data wait factor          DW = (max u + r) / (max b + r)
    communication efficiency  CE = (max b + r) / T
    computation scalability   CS = useful seconds of all ranks for one sample at the smallest
                                   measured size / the same at this size

Their product over that of the smallest size is the parallel efficiency X(N) B / (X(B) N). A slow
rank makes the others wait inside their communication; as CE knows the busiest rank only, that wait
counts as load imbalance. RB, which POP does not have, tells a rank that is slow from ranks slow in
turn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low, mode
from typing import Any

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size, median_of
from jobkit.analysis.scaling.spread import MAX_OTHER_LOAD
from jobkit.analysis.tables.frames import Row
from jobkit.spec.runspec import STRATEGIES

Factors = dict[str, tuple[float, str]]  # over those of a smaller size, each with its words
_CLOCKS = 0.02  # by which the host's clock and a GPU's events may differ
_MIN_TOLERANCE, _TOLERANCE = 0.02, 0.1  # of the logarithm of an efficiency, and of its loss
_NAMED = 1 / 3  # of the loss: a factor with less is not named
_ANOTHER_DAY_S = 12 * 3600
# What may differ between the runs of two sizes, and how it is called.
DIFFER = {"device": "device", "driver_version": "driver", "git_commit": "commit"}
DIFFER |= {"gpu_max_clock": "clock", "gpu_power_limit": "power limit"}
DIFFER |= {"cuda_version": "CUDA", "nccl_version": "NCCL"}
DIFFER |= {"cudnn_version": "cuDNN", "python_version": "Python"}


@dataclass(frozen=True)
class SizeBreakdown:
    """A size with a breakdown of its iterations: the factors of its efficiency by their names."""

    size: Size
    row: Row  # of results.csv, of the run that stands for the size
    first: Size  # the smallest size of the series that has a breakdown
    first_row: Row
    own: dict[str, float]
    base: dict[str, float]  # of the first size


def factors_of(row: Mapping[str, Any], ranks: int, samples: float) -> dict[str, float]:
    """The factors of a step on so many ranks with so many samples in all, by a row of results.csv.

    computation is in samples for each second of a rank, until it is divided by that of the first
    size. Empty where a time is missing or contradicts another.
    """
    names = ("compute", "host", "useful_max", "busy_max", "iteration", "random_imbalance")
    times: list[Any] = [row.get(f"breakdown_{name}_s") for name in names]
    # pandas has NA, which is no float, for none.
    if not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in times):
        return {}
    compute, host, useful_max, busy_max, iteration, random = times
    useful = compute + host
    ordered = pairwise((useful, useful_max, busy_max, iteration))
    if useful <= 0 or not all(a <= b * (1 + _CLOCKS) for a, b in ordered):
        return {}
    return {
        "load_balance": min(useful / useful_max, 1.0),  # of two clocks
        "random_balance": useful_max / (useful_max + random),
        "communication": (busy_max + random) / iteration,
        "data_wait": (useful_max + random) / (busy_max + random),
        "computation": samples / (useful * ranks),
    }


def size_breakdowns(results: Results) -> list[SizeBreakdown]:
    """The sizes with a breakdown record, series by series, small sizes first.

    Of the repeats, the one with the median iteration stands for the size, so that its parts
    belong together. A series whose runs must not be compared is left out.
    """
    breakdowns: list[SizeBreakdown] = []
    firsts: dict[str, tuple[Size, Row, dict[str, float]]] = {}
    for size in results.sizes:
        # Of another program the work of a step follows from what was measured of whole runs.
        work = size.global_batch_size or (size.throughput or 0) * (size.step_time_s or 0)
        if size.note or not size.world_size or not work:
            continue
        rows = {
            row["breakdown_iteration_s"]: (row, found)
            for row in reversed(rows_of(results, size))
            if (found := factors_of(row, size.world_size, work))
        }
        if rows:
            row, own = rows[median_low(rows)]
            first, of_first, base = firsts.setdefault(size.series, (size, row, own))
            scale = base["computation"]
            own, base = (x | {"computation": x["computation"] / scale} for x in (own, base))
            breakdowns.append(SizeBreakdown(size, row, first, of_first, own, base))
    return breakdowns


def cause_of(results: Results, size: Size) -> str:
    """Why a size is less efficient than its base, as the end of a sentence; may be empty."""
    if size.efficiency is None or size.efficiency >= 1 or size.is_base:
        return ""
    base = base_of(results, size)
    different = differences(results, size, base) if base else []
    first = next(s for s in results.sizes if s.series == size.series and s.speed_up)
    total = -math.log(size.efficiency)
    measured = (one for one in size_breakdowns(results) if one.size == size and one.first != size)
    own = next(measured, None)
    factors = _of_breakdown(own) if own else _of_waiting(results, size, first)
    serial = first.efficiency or 1
    if serial < 1 and first.world_size == first.devices == 1:  # another strategy is faster on one
        slower = f"{size.series} on 1 is {1 - serial:.0%} slower than {size.base_series}"
        factors |= {"serial": (serial, slower)}
    explained = math.prod(factor for factor, _ in factors.values())
    known = -math.log(explained)
    ends = size.interval("efficiency")
    half = math.log(ends[1] / ends[0]) / 2 if ends and ends[0] > 0 else 0.0
    gap = total - known
    close = abs(gap) <= max(half, _MIN_TOLERANCE, _TOLERANCE * total) and 2 * known >= total
    least = _NAMED * (total if gap > 0 and not close else known)
    lost = (text for f, text in sorted(factors.values()) if f < 1 and -math.log(f) >= least)
    words = " and ".join(lost)  # the largest first
    if not factors:
        text = "; what it is lost to was not measured"
    elif close:
        grown = -math.log(factors.get("computation", (1.0, ""))[0])
        different = different if grown > 0 and grown >= _NAMED * known else []
        text = f", because {words}" if words else ""
    elif gap < 0:
        text = f"; its profiled steps show {explained:.0%}, as {words}" if own else f"; {words}"
    else:
        different = different or ["no recorded device, version or node differs"]
        share = min(1.0, gap / total)  # what was measured may be less of a loss than at the base
        text = f"; {f'{words}, but ' if words else ''}{share:.0%} of the loss is outside of what "
        text += "was measured"
    return "; ".join(filter(None, [text, ", ".join(different)])) if text else ""


def late_of(results: Results, size: Size) -> str:
    """The rank or node that comes last in most runs of a size, as the end of a sentence."""
    names = ("breakdown_late_rank", "breakdown_late_host", "breakdown_late_cause")
    rows = [tuple(row.get(name) for name in names) for row in rows_of(results, size)]
    rank, host, cause = late = mode(rows or [(None,) * 3])
    if host is None or 2 * rows.count(late) <= len(rows):
        return ""
    who = f"rank {rank} on {host}" if rank is not None else host
    return f"; measured, not certain: {who} is late ({cause}), see why.png"


def _of_waiting(results: Results, size: Size, first: Size) -> Factors:
    """What is known to be lost where no step was profiled: the time that data are waited for."""
    wait, before = (median_of(rows_of(results, s), "data_wait_share") for s in (size, first))
    if wait is None or before is None or max(wait, before) >= 1:
        return Factors()
    return {"wait": ((1 - wait) / (1 - before), f"waiting for data takes {wait:.0%} of the time")}


def _of_breakdown(one: SizeBreakdown) -> Factors:
    row, own, base = one.row, one.own, one.base
    slowest, iteration = row["breakdown_useful_max_s"], row["breakdown_iteration_s"]
    wait = (row["breakdown_busy_max_s"] - slowest) / iteration
    # The ranks besides the slowest, so that their time is not in what all ranks compute.
    ranks, useful = one.size.world_size or 1, row["breakdown_compute_s"] + row["breakdown_host_s"]
    rank, host = row.get("breakdown_late_rank"), row.get("breakdown_late_host")
    slow = min((one.size.ranks_per_node or 1) if host and rank is None else 1, ranks - 1)
    others = (ranks * useful - slow * slowest) / (ranks - slow)
    others = min(others, slowest) if others > 0 else slowest
    uneven = slowest / others
    computation = own["computation"] * useful / others
    grown = base["computation"] / computation - 1
    late = f"rank {rank}" if rank is not None else "the slowest rank"
    late = f"{late if slow < 2 else 'each rank'} on {host}" if host else late
    # The rank-seconds of a sample, of which the host's part may have grown more than compute.
    before = one.first_row["breakdown_compute_s"] + one.first_row["breakdown_host_s"]
    compute_more, host_more = (
        row[part] / (own["computation"] * useful)
        - base["computation"] * one.first_row[part] / before
        for part in ("breakdown_compute_s", "breakdown_host_s")
    )
    work = "runs host code" if row.get("breakdown_late_cause") == "host" else "computes"
    words = {
        "communication": f"exposed communication takes {1 - own['communication']:.0%} of the step",
        "random_balance": "a different rank is late each time, "
        f"{1 - own['random_balance']:.0%} of the step",
        "data_wait": f"waiting for data takes {wait:.0%} of the step",
        "load_balance": f"{late} {work} {uneven - 1:.0%} longer than the others",
        "computation": f"a sample takes {grown:.0%} more rank-seconds, most of it in host code"
        if host_more > compute_more
        else f"computing a sample takes {grown:.0%} more rank-seconds",
    }
    shares = own | {"load_balance": base["load_balance"] / uneven, "computation": computation}
    return {name: (shares[name] / base[name], text) for name, text in words.items()}


def rows_of(results: Results, size: Size) -> list[Row]:
    """The rows of results.csv of the runs of a size that are ok."""
    return [results.rows[run] for run in size.ok_runs]


def values_of(rows: Sequence[Row], name: str) -> list[str]:
    """The different values of a column, as text."""
    return sorted({str(v) for row in rows if (v := row.get(name)) is not None})


def base_of(results: Results, size: Size | None) -> Size | None:
    """The size that another one is compared with."""
    bases = (s for s in results.sizes if size and s.series == size.base_series and s.is_base)
    return next(bases, None)


def differences(results: Results, size: Size, base: Size) -> list[str]:
    """What the runs of a size have and those of its base have not: device, threads, nodes, day."""
    own, other = rows_of(results, size), rows_of(results, base)
    if not own or not other:
        return []
    different = []
    for name, words in DIFFER.items():
        here, there = values_of(own, name), values_of(other, name)
        if here and there and not {*here} & {*there}:
            different.append(f"another {words} ({_short(here)}, not {_short(there)})")
        elif new := [value for value in here if there and value not in there]:
            different.append(f"another {words} in some runs ({_short(new)})")
    here, there = (values_of(table, "threads_used") for table in (own, other))
    if here and there and here != there and values_of([*own, *other], "device_type") == ["cpu"]:
        # By the same name all runs of a program would be ok.
        fix = "--threads 1" if size.strategy in STRATEGIES else "OMP_NUM_THREADS=1, another --name"
        words = f"another thread count ({_short(here)}, not {_short(there)}: set {fix})"
        different.insert(0, words)
    loads = [median_of(table, "other_load_mean") for table in (own, other)]
    if None not in loads and loads[0] - loads[1] > MAX_OTHER_LOAD:  # type: ignore[operator]
        different.append(f"other programs used {loads[0]:.0%} of the cores, {loads[1]:.0%} before")
    if not different:
        nodes = [{n for v in values_of(t, "node_list") for n in v.split(",")} for t in (own, other)]
        if base.nodes and (size.nodes or 0) > base.nodes:
            different.append(f"{size.nodes} nodes, not {base.nodes}")
        elif all(nodes) and not nodes[0] & nodes[1]:
            different.append("other nodes")
        times = [median_of(table, "start_time_s") for table in (own, other)]
        if None not in times and abs(times[0] - times[1]) > _ANOTHER_DAY_S:  # type: ignore[operator]
            different.append("another time of day or another day")
    return list(dict.fromkeys(different))


def _short(values: Sequence[str]) -> str:
    # Of a commit the first letters, and whether files were changed.
    shown = [v if len(v) < 30 else v[:12] + "+changes" * v.endswith("+changes") for v in values]
    return " and ".join(shown[:2]) + " and others" * (len(shown) > 2)
