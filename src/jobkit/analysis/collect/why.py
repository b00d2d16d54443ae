"""From the profiled steps of the ranks to the causes of a run's time, and to who is late.

Of a collective the rank that came last has the shortest duration: that is the transfer, and what
the others take longer is their waiting, at its beginning. So no clocks are compared. In step j rank
i is late by L(i, j) = the mean wait of the others - its own. A rank is late beyond chance where the
mean of L is over 3 standard errors and over 5 % of a step, at all of the places. Random
imbalance is by how much the last rank of each step is later than that one, or than the mean.

Few steps are profiled, and slow ones may be rare. How much they cost is the mean of all windows
less their typical step, the median.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import Record
from jobkit.program.why import minus, union

MAX_SHOWN = 16  # ranks beside the late one, in a figure
MIN_STEPS = 4  # from which a rank is said to be late
BEYOND_CHANCE = 3.0  # standard errors
MIN_SHARE, MIN_LATE_S = 0.05, 0.0005  # of a step, seconds: less is not worth a name
_SLOW = 1.5  # times the median: a step that is not typical
_PAIRWISE = ("send", "recv", "Send", "Recv")  # of two ranks: no two durations belong together
_PARTS = ("wall", "compute", "communication", "data_wait", "host")


class _Rank:
    """One rank's profiled steps: parts by step, and the seconds that it waited for others."""

    def __init__(self, record: Record) -> None:
        self.host, self.device = str(record.get("host")), record.get("device")
        self.gpu = bool(record.get("gpu"))
        self.parts: list[list[float]] = []
        self.waits: list[float] = []


def breakdown(whys: Iterable[Record], windows: Iterable[Record] = ()) -> Row:
    """The columns breakdown_* of a run, without the prefix; empty where nothing was profiled."""
    ranks = _ranks(whys)
    if not ranks:
        return {}
    typical = _typical(ranks)
    means = {rank: _means([r.parts[j] for j in typical]) for rank, r in ranks.items()}
    mean = _means(list(means.values()))
    wall, compute, communication, data, host = mean
    iteration = statistics.fmean(max(r.parts[j][0] for r in ranks.values()) for j in typical)
    slow_s, more_data_s = _over_the_run(windows, data)
    useful = {rank: m[1] + m[4] for rank, m in means.items()}
    waits = {rank: [r.waits[j] for j in typical] for rank, r in ranks.items()}
    waiting = min(statistics.fmean(w for own in waits.values() for w in own), communication)
    late = _late(ranks, waits, iteration, means)
    lasting = "late_s" in late
    # The last rank of a step waits least; what a late one is later than the mean is not in turn.
    usual = [waits[rank] for rank in late["ranks"]] if lasting else list(waits.values())
    in_turn = statistics.fmean(
        statistics.fmean(own[j] for own in usual) - min(own[j] for own in waits.values())
        for j in range(len(typical))
    )
    total = iteration + slow_s + more_data_s
    alone = len(ranks) == 1
    if alone:  # no other rank can be slow, and what is useful includes it
        host += slow_s
    longest = busiest = compute + host
    if lasting and late["late_cause"] != "data wait":
        longest = busiest = max(longest, max(useful[rank] for rank in late["ranks"]))
    if lasting and late["late_cause"] == "data wait":
        busiest += max(means[rank][3] for rank in late["ranks"]) - data
    busiest = min(busiest + data + more_data_s, total)
    row: Row = {
        "compute_s": compute,
        "communication_s": communication + (0.0 if alone else slow_s),
        "waiting_s": waiting + (0.0 if alone else slow_s),
        "data_wait_s": data + more_data_s,
        "host_s": host,
        "idle_s": host + data + more_data_s if next(iter(ranks.values())).gpu else None,
        "iteration_s": total,
        "last_rank_wait_s": max(0.0, iteration - wall),
        "useful_max_s": min(longest, total),
        "busy_max_s": busiest,
        "random_imbalance_s": 0.0 if alone else min(in_turn + slow_s, total - busiest),
        "slow_steps_s": slow_s,
        "profiled_steps": len(typical),
        "ranks": len(ranks),
    }
    if late:
        first = late.pop("ranks")
        shown = sorted([*first, *(r for r in means if r not in first)][:MAX_SHOWN])
        row["by_rank"] = json.dumps({
            rank: [round(x, 6) for x in _split(means[rank], statistics.fmean(waits[rank]))]
            for rank in shown
        })  # fmt: skip
    return row | late


def _split(mean: Sequence[float], waiting: float) -> list[float]:
    """Compute, exposed communication without waiting, waiting, data wait, host."""
    _, compute, communication, data, host = mean
    waiting = min(waiting, communication)
    return [compute, communication - waiting, waiting, data, host]


def not_profiled(whys: Iterable[Record]) -> str | None:
    """Why the run has no profiled step, as its ranks said."""
    reasons = [str(r["reason"]) for r in whys if r.get("reason")]
    return reasons[-1] if reasons else None


def _ranks(whys: Iterable[Record]) -> dict[int, _Rank]:
    """The ranks that were profiled at the same places, of the newest attempt."""
    places: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)
    for record in whys:
        if isinstance(record.get("parts"), list) and type(record.get("step")) is int:
            places[record["attempt"], record["step"]][record["rank"]] = record
    if not places:
        return {}
    newest = max(attempt for attempt, _ in places)
    of_newest = [found for (attempt, _), found in sorted(places.items()) if attempt == newest]
    fullest = max(map(len, of_newest))  # late places are left out by ranks without time for them
    of_newest = [found for found in of_newest if len(found) == fullest]
    common = set.intersection(*(set(found) for found in of_newest)) or set(of_newest[0])
    of_newest = [found for found in of_newest if common <= set(found)]
    ranks: dict[int, _Rank] = {}
    for found in of_newest:
        own = {rank: found[rank] for rank in sorted(common)}
        waits = _waits(own)
        steps = min(len(w) for w in waits.values())
        for rank, record in own.items():
            parts = [[float(x) for x in row] for row in record["parts"]]
            parts *= steps if record.get("gpu") else 1  # the mean stands for each
            ranks.setdefault(rank, _Rank(record)).parts += parts[:steps]
            ranks[rank].waits += waits[rank][:steps]
    return ranks


def _waits(records: Mapping[int, Record]) -> dict[int, list[float]]:
    """Seconds of each step that each rank waited inside of collectives for a later one."""
    steps = min(int(r["steps"]) for r in records.values())
    keyed = {rank: _by_order(record) for rank, record in records.items()}
    found: dict[int, list[float]] = {rank: [] for rank in records}
    for step in range(steps):
        own = {rank: keys.get(step, {}) for rank, keys in keyed.items()}
        common = set.intersection(*(set(keys) for keys in own.values()))
        shortest = {key: min(keys[key][1] for keys in own.values()) for key in common}
        for rank, keys in own.items():
            spans = [(*keys[key], shortest[key]) for key in common]
            early = union((begin, begin + length - least) for begin, length, least in spans)
            late = union((b + length - least, b + length) for b, length, least in spans)
            found[rank].append(_exposed(records[rank]["exposed"], minus(early, late)))
    return found


def _by_order(record: Record) -> dict[int, dict[tuple[str, int], tuple[int, int]]]:
    """Begin and duration of a rank's collectives: by step, name, and order."""
    spans = [c for c in record["collectives"] if not any(word in c[1] for word in _PAIRWISE)]
    steps = int(record["steps"])
    if record.get("gpu"):  # a GPU's steps are those of its collectives: each has as many
        size = max(1, -(-len(spans) // steps))
        spans = [[i // size, *c[1:]] for i, c in enumerate(spans)]
    keyed: dict[int, dict[tuple[str, int], tuple[int, int]]] = defaultdict(dict)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for step, name, begin, length in spans:
        counts[step, name] += 1
        keyed[step][name, counts[step, name]] = int(begin), int(length)
    return keyed


def _exposed(exposed: Iterable[Sequence[int]], spans: Sequence[tuple[int, int]]) -> float:
    """Seconds of exposed communication within spans; all in microseconds."""
    total = 0.0
    for begin, end, length in exposed:
        inside = sum(min(end, b) - max(begin, a) for a, b in spans if b > begin and a < end)
        total += inside * length / max(end - begin, 1)
    return total / 1e6


def _typical(ranks: Mapping[int, _Rank]) -> list[int]:
    """The steps that are not far longer than the median one."""
    steps = min(len(r.parts) for r in ranks.values())
    walls = [max(r.parts[j][0] for r in ranks.values()) for j in range(steps)]
    limit = _SLOW * statistics.median(walls)
    return [j for j, wall in enumerate(walls) if wall <= limit]


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _over_the_run(windows: Iterable[Record], data: float) -> tuple[float, float]:
    """Seconds of a step over the whole run: of rare slow ones, and of data wait beyond that of the
    profiled steps."""
    compared = [
        w for w in windows
        if not w.get("warmup") and w.get("steps") and w.get("wall_s") and w.get("step_p50_s")
    ]  # fmt: skip
    if not compared:
        return 0.0, 0.0
    steps = sum(w["steps"] for w in compared)
    mean = sum(w["wall_s"] for w in compared) / steps
    middle = sorted((w["step_p50_s"], w["steps"]) for w in compared)
    seen, typical = 0, middle[-1][0]
    for value, count in middle:
        seen += count
        if 2 * seen >= steps:
            typical = value
            break
    # Each window beside its own median, as a machine's speed may drift; one of few steps has none.
    usual = sum(w["steps"] * (w["step_p50_s"] if w["steps"] > 2 else typical) for w in compared)
    waited = sum(w.get("data_wait_s") or 0.0 for w in compared) / steps
    more_data = max(0.0, waited - data)
    slow = max(0.0, mean - usual / steps - more_data)
    return slow, more_data


def _lateness(waits: Mapping[Any, Sequence[float]]) -> dict[Any, list[float]]:
    """L(i, j): the mean wait of the others less the own, by step."""
    others = len(waits) - 1
    sums = [sum(column) for column in zip(*waits.values(), strict=True)]
    return {
        i: [(total - w) / others - w for total, w in zip(sums, own, strict=True)]
        for i, own in waits.items()
    }


def _last(waits: Mapping[Any, Sequence[float]], step_s: float) -> tuple[Any, float] | None:
    """The rank (or host) that is late beyond chance and matters, and by how much."""
    if len(waits) < 2 or len(next(iter(waits.values()))) < MIN_STEPS:
        return None
    best: tuple[Any, float] | None = None
    for who, late in _lateness(waits).items():
        mean = statistics.fmean(late)
        error = statistics.stdev(late) / math.sqrt(len(late))
        least = max(BEYOND_CHANCE * error, MIN_SHARE * step_s, MIN_LATE_S)
        # Neighbouring steps are alike: a burst of something else is no lasting lateness.
        size = -(-len(late) // 3)
        thirds = [statistics.fmean(late[i : i + size]) for i in range(0, len(late), size)]
        lasts = min(thirds) > mean / 3
        if mean > least and lasts and (best is None or mean > best[1]):
            best = who, mean
    return best


def _late(
    ranks: Mapping[int, _Rank],
    waits: Mapping[int, Sequence[float]],
    step_s: float,
    means: Mapping[int, Sequence[float]],
) -> Row:
    """The late rank, or host where its ranks are late in turn, and by which part; else nothing."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank, r in ranks.items():
        hosts[r.host].append(rank)
    of_hosts = {
        host: [statistics.fmean(column) for column in zip(*(waits[r] for r in own), strict=True)]
        for host, own in hosts.items()
    }
    by_rank, by_host = _last(waits, step_s), _last(of_hosts, step_s)
    if by_rank is None and by_host is None:
        return {}
    host = ranks[by_rank[0]].host if by_rank else str(by_host[0]) if by_host else ""
    whole = by_host is not None and by_host[0] == host and len(hosts[host]) > 1
    if by_host and whole and (by_rank is None or 2 * by_host[1] > by_rank[1]):
        who, late_s = hosts[host], by_host[1]
    else:
        assert by_rank is not None
        who, late_s = [by_rank[0]], by_rank[1]
    others = [r for r in ranks if r not in who]
    own, rest = (_means([means[r] for r in some]) for some in (who, others))
    more = {_PARTS[i].replace("_", " "): own[i] - rest[i] for i in (1, 3, 4)}
    return {
        "late_rank": who[0] if len(who) == 1 else None,
        "late_host": host,
        "late_device": ranks[who[0]].device if len(who) == 1 else None,
        "late_s": late_s,
        "late_cause": max(more, key=lambda part: more[part]),
        "ranks": who,
    }


# --- in words ------------------------------------------------------------------------------------

MAX_OTHER_LOAD = 0.05  # of the cores, beyond which rates may be disturbed


def busy_clause(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """That others used the machine while runs were measured; None where they did not.

    runs: rows of results.csv.
    """
    runs = list(runs)
    loads = [(load, r) for r in runs if (load := _known(r.get("other_load_mean")) or 0.0)]
    shared = [r for r in runs if (_known(r.get("gpu_processes_max")) or 0.0) > 1]
    text = []
    if busy := [pair for pair in loads if pair[0] > MAX_OTHER_LOAD]:
        most, run = max(busy, key=lambda pair: pair[0])
        text.append(
            f"other processes used up to {most:.0%} of the cores while {len(busy)} of "
            f"{len(loads)} runs were measured ({run['run_id']}): measure again on an idle machine"
        )
    if shared:
        text.append(
            f"other processes computed on the GPUs of {len(shared)} runs: measure again alone"
        )
    return "; ".join(text) or None


def _known(value: Any) -> float | None:
    """A number; None for what pandas has in its place."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else None
