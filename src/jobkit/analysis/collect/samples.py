"""What the ranks of a run sampled of their machines: load, memory and energy.

Energy counts where every node of the run, or every rank's GPU, has a counter. It is divided by the
work between the ends of two windows, the warm-up left out: what is between, such as evaluation, is
part of it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import Observed, number
from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import Record

_LOADS = {"cpu_busy": "cpu_busy_mean", "other_load": "other_load_mean", "gpu_busy": "gpu_busy_mean"}
_LOADS |= {"memory_mib": "node_memory_max_mib", "gpu_memory_mib": "gpu_memory_max_mib"}
_LOADS |= {"gpu_processes": "gpu_processes_max"}
_Curve = Sequence[tuple[float, float]]  # times, and the energy so far


def use_row(
    records: RunRecords, observed: Observed | None, size: Mapping[str, Any], slurm_j: float | None
) -> Row:
    """The columns about load and energy. slurm_j: Slurm's, if the job is this run's alone.

    size: nodes and world_size of the run.
    """
    samples = records.of_all_ranks("sample")
    attempts: dict[int, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in samples:
        if number(record.get("t")) is not None and type(record.get("rank")) is int:
            attempts[record["attempt"]][record["rank"]].append(record)
    row = _load([of_rank for ranks in attempts.values() for of_rank in ranks.values()])
    # The work of each window over all ranks. A line of a program's own log is that of no window.
    steps = observed.steps if observed and observed.windows else ()
    works = {(o.attempt, o.step): o.work for o in steps}
    texts = (str(record.get("energy_source") or "") for record in samples)
    names = dict.fromkeys(part for text in texts for part in text.split(", "))
    sources = []
    for scope, wanted in (("node", size.get("nodes")), ("gpu", size.get("world_size"))):
        curves = {a: _curves(ranks, scope, wanted) for a, ranks in attempts.items()}
        if not curves or not all(curves.values()):
            continue
        row[f"energy_{scope}_j"] = sum(c[-1][1] for ranks in curves.values() for c in ranks)
        sources += [name for name in names if name.endswith(f"({scope})")]
        if scope == "gpu" and "energy_node_j" in row:
            continue  # the node's, which has more in it, is divided by the work
        if (used := _per_work(curves, records, works)) is not None:
            row |= {"joules_per_work": used, "joules_of": scope}
    alone = any(r.get("alone") is True for r in samples)
    if "energy_node_j" not in row and slurm_j is not None and alone and len(attempts) == 1:
        row["energy_node_j"] = slurm_j
        sources.insert(0, "slurm (node, whole job)")
        if works and None not in works.values() and (total := sum(filter(None, works.values()))):
            row |= {"joules_per_work": slurm_j / total, "joules_of": "node, whole job"}
    return row | ({"energy_source": ", ".join(sources)} if sources else {})


def _load(series: Sequence[Sequence[Record]]) -> Row:
    """Mean over time and ranks of the load, and the maxima of memory and processes."""
    row: Row = {}
    for name, column in _LOADS.items():
        parts = []  # each value with the seconds since the sample before
        for before, now in (pair for samples in series for pair in pairwise(samples)):
            begin, end, value = map(number, (before.get("at_s"), now.get("at_s"), now.get(name)))
            if begin is not None and end is not None and end > begin and value is not None:
                parts.append((value, end - begin))
        if parts and "_max" in column:
            row[column] = max(value for value, _ in parts)
        elif parts:
            row[column] = sum(v * s for v, s in parts) / sum(s for _, s in parts)
    return row


def _curves(ranks: Mapping[int, Sequence[Record]], scope: str, wanted: object) -> list[_Curve]:
    """Of each rank when, and the energy so far. Empty where a node or GPU lacks it.

    It goes on where a restarted process began at zero. Of ranks that share a GPU, which node and
    UUIDs tell, each reads all of its energy: one of them counts.
    """
    curves: dict[object, _Curve] = {}
    count = 0
    for rank, samples in sorted(ranks.items(), reverse=True):
        values = [(r["t"], number(r.get(f"energy_{scope}_j"))) for r in samples]
        curve, total, before = list[tuple[float, float]](), 0.0, 0.0
        for at, now in values:
            if now is not None:
                total += now - before if now >= before else now
                before = now
                curve.append((at, total))
        uuids = samples[0].get("gpu_uuids") if scope == "gpu" else None
        gpus = (str(samples[0].get("host")), uuids) if uuids and isinstance(uuids, str) else rank
        if curve:
            curves[gpus] = curve
            count += 1
    return list(curves.values()) if count == wanted else []


def _per_work(
    curves: Mapping[int, Sequence[_Curve]],
    records: RunRecords,
    works: Mapping[tuple[int, int | None], float | None],
) -> float | None:
    """Joules for a unit of work, between the first and the last window that all samples cover.

    Of rank 0's windows, from the warm-up's on, those ends count at which all ranks ended a window.
    """
    ends: dict[int, list[tuple[int, float]]] = defaultdict(list)  # last step, and when
    for record in (r for r in records.of("window") if "v" in r):
        attempt, step, at = record["attempt"], record.get("step"), number(record.get("t"))
        if type(step) is int and at is not None:
            if record.get("warmup") is True:
                ends[attempt].clear()
            ends[attempt] += [(step, at)] if (attempt, step) in works else []
    joules = work = 0.0
    for attempt, of_ranks in curves.items():
        first, last = max(c[0][0] for c in of_ranks), min(c[-1][0] for c in of_ranks)
        inside = [(step, at) for step, at in ends[attempt] if first <= at <= last]
        done = [works[attempt, step] for step, _ in inside[1:]]
        if not done or None in done:
            continue
        work += sum(filter(None, done))
        for curve in of_ranks:
            times, energy = np.array(curve).T
            begin, end = np.interp([inside[0][1], inside[-1][1]], times, energy)
            joules += float(end - begin)
    return joules / work if work > 0 else None
