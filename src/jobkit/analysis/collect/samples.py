"""What the ranks of a run sampled of their machines: load, memory and energy.

Energy counts where every node of the run, or every rank's GPU, has a counter. It is that from the
first step to the last, evaluation included, and is divided by the work of all of them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import Observed
from jobkit.analysis.tables.frames import Row
from jobkit.metric.kinds import Record, number

_LOADS = {"cpu_busy": "cpu_busy_mean", "other_load": "other_load_mean", "gpu_busy": "gpu_busy_mean"}
_LOADS |= {"memory_mib": "node_memory_max_mib", "gpu_memory_mib": "gpu_memory_max_mib"}
_LOADS |= {"gpu_processes": "gpu_processes_max"}


def use_row(records: RunRecords, observed: Observed | None, size: Mapping[str, Any]) -> Row:
    """The columns about load and energy. size: nodes and world_size of the run."""
    samples = records.of_all_ranks("sample")
    attempts: dict[int, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in samples:
        if type(record.get("rank")) is int:
            attempts[record["attempt"]][record["rank"]].append(record)
    row = _load([of_rank for ranks in attempts.values() for of_rank in ranks.values()])
    # The work of the windows over all ranks. A line of a program's own log is that of no window.
    steps = observed.steps if observed and observed.windows else ()
    works = [o.work for o in steps if o.attempt in attempts]
    texts = (str(record.get("energy_source") or "") for record in samples)
    names = dict.fromkeys(part for text in texts for part in text.split(", "))
    sources = list[str]()
    for scope, wanted in (("gpu", size.get("world_size")), ("node", size.get("nodes"))):
        joules = [_energy(ranks, scope, wanted) for ranks in attempts.values()]
        if not joules or None in joules:
            continue
        row[f"energy_{scope}_j"] = total = sum(filter(None, joules))
        sources = [name for name in names if name.endswith(f"({scope})")] + sources
        if None not in works and (work := sum(filter(None, works))) > 0:
            # The node's, which has more in it, counts before the GPUs'.
            row |= {"joules_per_work": total / work, "joules_of": scope}
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


def _energy(ranks: Mapping[int, Sequence[Record]], scope: str, wanted: object) -> float | None:
    """The energy of all nodes or GPUs; None where one of them lacks a counter.

    It goes on where a restarted process began at zero. Of ranks that share a GPU, which node and
    UUIDs tell, each reads all of its energy: one of them counts.
    """
    joules: dict[object, float] = {}
    count = 0
    for rank, samples in sorted(ranks.items(), reverse=True):
        values = [x for r in samples if (x := number(r.get(f"energy_{scope}_j"))) is not None]
        uuids = samples[0].get("gpu_uuids") if scope == "gpu" else None
        gpus = (str(samples[0].get("host")), uuids) if uuids and isinstance(uuids, str) else rank
        if values:
            pairs = pairwise([0, *values])
            joules[gpus] = sum(now - old if now >= old else now for old, now in pairs)
            count += 1
    return sum(joules.values()) if count == wanted else None
