"""What the ranks of a run sampled of their machines: load, memory and energy.

Energy counts where every node of the run, or every rank's GPU, has a counter. It is divided by the
work between the ends of two windows, the warm-up left out: what is between, such as evaluation, is
part of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import MAX_ROWS, Observed, number
from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import KINDS, Record

SCOPES = ("node", "gpu")  # the first that was measured is divided by the work
_OF_USE = {
    "cpu_busy": "cpu_busy",
    "memory_mib": "node_memory",
    "gpu_busy": "gpu_busy",
    "gpu_memory_mib": "gpu_memory",
}
_Series = dict[int, list[Record]]  # the samples of each rank, in order


class _Edge(NamedTuple):
    """The end of a window: its last step, and when it was written."""

    step: int
    at: float


def sample_rows(samples: Sequence[Record]) -> list[Row]:
    """The rows of samples.csv of one run; of more than MAX_ROWS, every second or third, ..."""
    size = -(-len(samples) // MAX_ROWS) or 1
    names = ("attempt", "rank", "t", *KINDS["sample"])
    return [{name: record.get(name) for name in names} for record in samples[::size]]


def use_row(
    records: RunRecords, observed: Observed | None, size: Mapping[str, Any], slurm_j: float | None
) -> Row:
    """The columns about load and energy. slurm_j: Slurm's, if the job is this run's alone.

    size: nodes and world_size of the run.
    """
    by_attempt: dict[int, _Series] = defaultdict(lambda: defaultdict(list))
    for record in records.samples:
        if number(record.get("t")) is not None and type(record.get("rank")) is int:
            by_attempt[record["attempt"]][record["rank"]].append(record)
    attempts = list(by_attempt.values())
    row = _use([one for series in attempts for one in series.values()])
    wanted = {"node": size.get("nodes"), "gpu": size.get("world_size")}
    whole = {s: _of_scope(by_attempt, s, wanted[s]) for s in SCOPES}
    measured = {scope: found for scope, found in whole.items() if found}
    for scope, found in measured.items():
        row[f"energy_{scope}_j"] = sum(_total(one) for of_rank in found.values() for one in of_rank)
    works = _works(observed)
    if measured:
        first = next(iter(measured))
        used = _per_work(measured[first], _edges(records), works)
        row |= {"joules_per_work": used, "joules_of": first} if used is not None else {}
        row["energy_source"] = _sources(records.samples, measured)
    alone = any(r.get("alone") is True for r in records.samples)
    if "node" not in measured and slurm_j is not None and alone and len(attempts) == 1:
        row["energy_node_j"] = slurm_j
        others = row.get("energy_source")
        row["energy_source"] = "slurm (node, whole job)" + (f", {others}" if others else "")
        if works and None not in works.values() and (total := sum(filter(None, works.values()))):
            row |= {"joules_per_work": slurm_j / total, "joules_of": "node, whole job"}
    return row


def _use(series: Sequence[Sequence[Record]]) -> Row:
    """Mean over time and ranks, and maximum, of load and memory."""
    row: Row = {}
    for name, column in _OF_USE.items():
        unit = "_mib" if name.endswith("_mib") else ""
        parts = [part for one in series for part in _weighted(one, name)]
        total = sum(weight for _, weight in parts)
        if total > 0:
            row[f"{column}_mean{unit}"] = sum(v * weight for v, weight in parts) / total
            row[f"{column}_max{unit}"] = max(v for v, _ in parts)
    return row


def _weighted(series: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """The values of a rank's samples, each with the seconds since the one before."""
    found = []
    for before, now in pairwise(series):
        begin, end, value = (
            number(r.get(k)) for r, k in ((before, "at_s"), (now, "at_s"), (now, name))
        )
        if begin is not None and end is not None and value is not None and end > begin:
            found.append((value, end - begin))
    return found


def _of_scope(
    by_attempt: Mapping[int, _Series], scope: str, wanted: object
) -> dict[int, list[list[tuple[float, float]]]]:
    """By attempt, of each rank: when, and the energy so far. Empty where a node or GPU lacks it.

    Of ranks that share a GPU each reads all of its energy: one of them counts.
    """
    found = {}
    for attempt, series in by_attempt.items():
        name = f"energy_{scope}_j"
        curves = {rank: curve for rank, one in series.items() if (curve := _curve(one, name))}
        if not curves or len(curves) != wanted:
            return {}
        if scope == "gpu":
            first_of = {_gpus(rank, series[rank]): rank for rank in sorted(curves, reverse=True)}
            curves = {rank: curves[rank] for rank in first_of.values()}
        found[attempt] = list(curves.values())
    return found


def _gpus(rank: int, series: Sequence[Record]) -> object:
    """What tells a rank's GPUs from others: node and UUIDs, else the rank itself."""
    first = series[0]
    uuids, host = first.get("gpu_uuids"), first.get("host")
    return (str(host), uuids) if uuids and isinstance(uuids, str) else rank


def _curve(series: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """Time and energy of a rank's samples; it goes on where a restarted process began at zero."""
    known = [(r["t"], v) for r in series if (v := number(r.get(name))) is not None]
    made, total = [], 0.0
    for (_, before), (at, now) in pairwise([(0.0, 0.0), *known]):
        total += now - before if now >= before else now
        made.append((at, total))
    return made


def _total(curve: Sequence[tuple[float, float]]) -> float:
    return curve[-1][1]


def _edges(records: RunRecords) -> dict[int, list[_Edge]]:
    """By attempt, the ends of rank 0's windows, from that of the warm-up on."""
    found: dict[int, list[_Edge]] = defaultdict(list)
    for record in records.of("window"):
        step, at = record.get("step"), number(record.get("t"))
        if type(step) is int and at is not None:
            if record.get("warmup") is True:
                found[record["attempt"]].clear()
            found[record["attempt"]].append(_Edge(step, at))
    return found


def _works(observed: Observed | None) -> dict[tuple[int, int], float | None]:
    """The work of each window over all ranks, by attempt and last step.

    A line of the program's own log may be of one step of many: it is the work of no window.
    """
    steps = observed.steps if observed and observed.windows else ()
    return {(o.attempt, o.step): o.work for o in steps if o.step is not None}


def _per_work(
    curves: Mapping[int, Sequence[Sequence[tuple[float, float]]]],
    edges: Mapping[int, Sequence[_Edge]],
    works: Mapping[tuple[int, int], float | None],
) -> float | None:
    """Joules for a unit of work, between the first and the last window that all samples cover.

    Of rank 0's windows those ends count at which all ranks ended a window.
    """
    joules = work = 0.0
    for attempt, of_ranks in curves.items():
        first, last = max(c[0][0] for c in of_ranks), min(c[-1][0] for c in of_ranks)
        common = [e for e in edges.get(attempt, ()) if (attempt, e.step) in works]
        inside = [e for e in common if first <= e.at <= last]
        done = [works.get((attempt, e.step)) for e in inside[1:]]
        if not done or None in done:
            continue
        work += sum(filter(None, done))
        begin, end = inside[0].at, inside[-1].at
        joules += sum(_energy_at(c, end) - _energy_at(c, begin) for c in of_ranks)
    return joules / work if work > 0 else None


def _energy_at(curve: Sequence[tuple[float, float]], at: float) -> float:
    """The energy at a time between two samples, in proportion to the time."""
    for (t0, e0), (t1, e1) in pairwise(curve):
        if t0 <= at <= t1:
            return e0 + (e1 - e0) * ((at - t0) / (t1 - t0) if t1 > t0 else 1.0)
    return _total(curve)


def _sources(samples: Iterable[Record], scopes: Iterable[str]) -> str:
    """The counters of these scopes, as the samples name them."""
    said = [part for r in samples for part in str(r.get("energy_source") or "").split(", ")]
    return ", ".join(p for s in scopes for p in dict.fromkeys(said) if p.endswith(f"({s})"))
