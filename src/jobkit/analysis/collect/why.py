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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jobkit.analysis.scaling.spread import MAX_OTHER_LOAD
from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import Record, number
from jobkit.program.why import minus, union

MAX_SHOWN = 16  # ranks beside the late one, in a figure
MIN_STEPS = 4  # from which a rank is said to be late
BEYOND_CHANCE = 3.0  # standard errors
MIN_SHARE, MIN_LATE_S = 0.05, 0.0005  # of a step, seconds: less is not worth a name
_SLOW = 1.5  # times the median: a step that is not typical
_PAIRWISE = ("send", "recv", "Send", "Recv")  # of two ranks: no two durations belong together
# Where the seconds of a step stand in the parts of a record.
_WALL, _COMPUTE, _COMMUNICATION, _DATA, _HOST = range(5)
_CAUSES = {"compute": _COMPUTE, "data wait": _DATA, "host": _HOST}


def breakdown(whys: Sequence[Record], windows: Iterable[Record] = ()) -> Row:
    """The columns breakdown_* of a run, without the prefix; if nothing was profiled, why."""
    ranks, parts, waits = _profiled(whys)
    if not ranks:
        reasons = [str(record["reason"]) for record in whys if record.get("reason")]
        return {"not_profiled": reasons[-1] if reasons else None}
    walls = parts[:, :, _WALL].max(axis=0)
    typical = walls <= _SLOW * np.median(walls)
    parts, waits, iteration = parts[:, typical], waits[:, typical], float(walls[typical].mean())
    means = parts.mean(axis=1)
    wall, compute, communication, data, host = means.mean(axis=0).tolist()
    late, about_late = _late(ranks, waits, means, iteration)
    cause = about_late.get("late_cause")
    gpu = bool(ranks[0].get("gpu"))
    slow_s, more_data_s, usual_s = _over_the_run(windows, data, gpu)
    # The profiler slows the host of a GPU, and no kernel.
    slower = max(0.0, min(iteration - usual_s, host)) if gpu and usual_s else 0.0
    wall, iteration, host = wall - slower, iteration - slower, host - slower
    # The last rank of a step waits least; what a late one is later than the mean is not in turn.
    usual = waits[late] if late else waits
    in_turn = float((usual.mean(axis=0) - waits.min(axis=0)).mean())
    waiting = min(float(waits.mean()), communication)
    total = iteration + slow_s + more_data_s
    alone = len(ranks) == 1 or not communication  # nobody waits for a slow one, so that is useful
    if alone:
        host += slow_s
    else:
        communication, waiting = communication + slow_s, waiting + slow_s
    longest = busiest = compute + host
    if cause == "data wait":
        busiest += float(means[late, _DATA].max()) - data
    elif cause:
        useful = means[:, _COMPUTE] + means[:, _HOST] - slower
        longest = busiest = max(longest, float(useful[late].max()))
    busiest = min(busiest + data + more_data_s, total)
    random = 0.0 if alone else min(in_turn + slow_s, total - busiest)
    row: Row = {
        "compute_s": compute,
        "communication_s": communication,
        "waiting_s": waiting,
        "data_wait_s": data + more_data_s,
        "host_s": host,
        "iteration_s": total,
        "last_rank_wait_s": max(0.0, iteration - wall),
        "useful_max_s": min(longest, total),
        "busy_max_s": busiest,
        "random_imbalance_s": random,
        "slow_steps_s": slow_s,
        "ranks": len(ranks),
    }
    if late:
        of_ranks = dict[int, list[float]]()
        for i in sorted([*late, *(i for i in range(len(ranks)) if i not in late)][:MAX_SHOWN]):
            _, compute, communication, data, host = means[i].tolist()
            waiting = min(float(waits[i].mean()), communication)
            own = (compute, communication - waiting, waiting, data, host)
            of_ranks[ranks[i]["rank"]] = [round(x, 6) for x in own]
        row["by_rank"] = json.dumps(of_ranks)
    return row | about_late


def _profiled(whys: Iterable[Record]) -> tuple[list[Record], np.ndarray, np.ndarray]:
    """The ranks that were profiled at the same places, of the newest attempt.

    A record of each; their parts, by rank, step and part; and the seconds that they waited for
    others, by rank and step.
    """
    places: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)
    for record in whys:
        if record.get("parts") and record.get("steps") and type(record.get("step")) is int:
            places[record["attempt"], record["step"]][record["rank"]] = record
    newest = max((attempt for attempt, _ in places), default=None)
    own = [of_ranks for (attempt, _), of_ranks in sorted(places.items()) if attempt == newest]
    if not own:
        return [], np.empty(0), np.empty(0)
    fullest = max(map(len, own))  # late places are left out by ranks without time for them
    own = [of_ranks for of_ranks in own if len(of_ranks) == fullest]
    common = set.intersection(*map(set, own)) or {*own[0]}
    parts, waits = [], []
    for of_ranks in own:
        if common <= of_ranks.keys():
            records = [of_ranks[rank] for rank in sorted(common)]
            waited = _waits(records)
            steps = len(waited[0])
            # The mean stands for each step of a GPU.
            rows = [r["parts"] * steps if r.get("gpu") else r["parts"] for r in records]
            steps = min(steps, *map(len, rows))
            parts.append(np.array([of_rank[:steps] for of_rank in rows], dtype=float))
            waits.append(waited[:, :steps])
    first = [own[0][rank] for rank in sorted(common)]
    return first, np.concatenate(parts, axis=1), np.concatenate(waits, axis=1)


def _waits(records: Sequence[Record]) -> np.ndarray:
    """Seconds of each step that each rank waited inside of collectives for a later one."""
    waits = np.zeros((len(records), min(int(r["steps"]) for r in records)))
    keyed = [_by_order(record) for record in records]
    for step in range(waits.shape[1]):
        own = [of_steps.get(step, {}) for of_steps in keyed]
        common = set.intersection(*map(set, own))
        shortest = {key: min(keys[key][1] for keys in own) for key in common}
        for rank, keys in enumerate(own):
            spans = [(*keys[key], shortest[key]) for key in common]
            early = union((begin, begin + length - least) for begin, length, least in spans)
            late = union((b + length - least, b + length) for b, length, least in spans)
            waits[rank, step] = _exposed(records[rank]["exposed"], minus(early, late))
    return waits


def _by_order(record: Record) -> dict[int, dict[tuple[str, int], tuple[int, int]]]:
    """Begin and duration of a rank's collectives: by step, name, and order."""
    spans = [c for c in record["collectives"] if not any(word in c[1] for word in _PAIRWISE)]
    if record.get("gpu"):  # a GPU's steps are those of its collectives: each has as many
        size = max(1, -(-len(spans) // int(record["steps"])))
        spans = [[i // size, *c[1:]] for i, c in enumerate(spans)]
    keyed: dict[int, dict[tuple[str, int], tuple[int, int]]] = defaultdict(dict)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for step, name, begin, length in spans:
        counts[step, name] += 1
        keyed[step][name, counts[step, name]] = int(begin), int(length)
    return keyed


def _exposed(exposed: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> float:
    """Seconds of exposed communication within spans; all in microseconds, and in order."""
    inside, outside = ((b - a for a, b in some) for some in (exposed, minus(exposed, spans)))
    return (sum(inside) - sum(outside)) / 1e6


def _over_the_run(windows: Iterable[Record], data: float, gpu: bool) -> tuple[float, float, float]:
    """Seconds of a step over the whole run: of rare slow ones, of data wait beyond that of the
    profiled steps, and of a typical step (0: not known)."""
    compared = [
        (steps, wall_s, p50_s, number(w.get("data_wait_s")) or 0.0)
        for w in windows
        if not w.get("warmup")
        and (steps := number(w.get("steps")) or 0.0) > 0
        and (wall_s := number(w.get("wall_s")) or 0.0) > 0
        and (p50_s := number(w.get("step_p50_s")) or 0.0) > 0
    ]
    if not compared:
        return 0.0, 0.0, 0.0
    total = sum(steps for steps, *_ in compared)
    mean = sum(wall_s for _, wall_s, *_ in compared) / total
    typical = _median([(p50_s, steps) for steps, _, p50_s, _ in compared])
    # Each window beside its own median, as a machine's speed may drift; one of few steps has none.
    usual = sum(steps * (p50_s if steps > 2 else typical) for steps, _, p50_s, _ in compared)
    more_data = max(0.0, sum(waited for *_, waited in compared) / total - data)
    if gpu:  # its work hides what the host waits for, but for what makes steps longer
        more_data = min(more_data, max(0.0, mean - typical))
    return max(0.0, mean - usual / total - more_data), more_data, typical


def _median(values: Sequence[tuple[float, float]]) -> float:
    """The median of values, each with the number of steps that it stands for."""
    ordered, steps = np.array(sorted(values)).T
    seen = np.cumsum(steps)
    middle = [np.searchsorted(seen, seen[-1] / 2, side) for side in ("left", "right")]
    return float(ordered[middle].mean())


def _late(
    ranks: Sequence[Record], waits: np.ndarray, means: np.ndarray, step_s: float
) -> tuple[list[int], Row]:
    """A rank that is late, or those of a host that are late in turn; and the columns about it."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for i, record in enumerate(ranks):
        hosts[str(record.get("host"))].append(i)
    by_rank = _last(waits, step_s)
    by_host = _last(np.array([waits[own].mean(axis=0) for own in hosts.values()]), step_s)
    who, late_s = ([by_rank[0]], by_rank[1]) if by_rank else ([], 0.0)
    if by_host:
        own = list(hosts.values())[by_host[0]]
        if not who or (who[0] in own and len(own) > 1 and 2 * by_host[1] > late_s):
            who, late_s = own, by_host[1]
    if not who:
        return [], {}
    others = [i for i in range(len(ranks)) if i not in who]
    more = means[who].mean(axis=0) - means[others].mean(axis=0)
    one = ranks[who[0]] if len(who) == 1 else {}
    return who, {
        "late_rank": one.get("rank"),
        "late_host": str(ranks[who[0]].get("host")),
        "late_device": one.get("device"),
        "late_s": late_s,
        "late_cause": max(_CAUSES, key=lambda cause: more[_CAUSES[cause]]),
    }


def _last(waits: np.ndarray, step_s: float) -> tuple[int, float] | None:
    """The rank (or host) that is late beyond chance and matters, and by how much."""
    count, steps = waits.shape
    if count < 2 or steps < MIN_STEPS:
        return None
    best: tuple[int, float] | None = None
    size = -(-steps // 3)
    for who, late in enumerate((waits.sum(axis=0) - waits) / (count - 1) - waits):
        mean, error = float(late.mean()), float(late.std(ddof=1)) / math.sqrt(steps)
        least = max(BEYOND_CHANCE * error, MIN_SHARE * step_s, MIN_LATE_S)
        # Neighbouring steps are alike: a burst of something else is no lasting lateness.
        thirds = [late[i : i + size].mean() for i in range(0, steps, size)]
        if mean > least and min(thirds) > mean / 3 and (best is None or mean > best[1]):
            best = who, mean
    return best


def busy_clause(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """That others used the machine while these rows of results.csv were measured; else None."""
    runs = list(runs)
    pairs = ((r.get("other_load_mean"), r["run_id"]) for r in runs)
    loads = [(load, run_id) for load, run_id in pairs if load is not None and load >= 0]
    text = []
    if busy := [pair for pair in loads if pair[0] > MAX_OTHER_LOAD]:
        most, run_id = max(busy, key=lambda pair: pair[0])
        where = f"in {len(busy)} of {len(loads)} runs (most in {run_id})"
        used = f"other processes used up to {most:.0%} of the cores {where}"
        text.append(f"{used}: measure again on an idle machine")
    if shared := sum((r.get("gpu_processes_max") or 0.0) > 1 for r in runs):
        text.append(f"other processes computed on the GPUs of {shared} runs: measure again alone")
    return "; ".join(text) or None
