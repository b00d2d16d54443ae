"""Predictions of a study for sizes that were not measured.

Forecast is their one owner: the table, the terminal, the report and the figure show what it gives.
Where jobkit comm measured the links, what a step sends takes its time over them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.conditions import failure
from jobkit.analysis.scaling.predict import Ends, Prediction
from jobkit.analysis.scaling.sizes import Size, fewest_nodes
from jobkit.analysis.tables.columns import FORECAST
from jobkit.analysis.tables.frames import Row, frame
from jobkit.errors import UsageError
from jobkit.metric.comm import Line
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.study import read_run_spec
from jobkit.spec.traffic import Link, Links, ModelSize, seconds
from jobkit.units import bus_factor, passes


@dataclass(frozen=True)
class Forecast:
    """The prediction for larger sizes of one series."""

    base: Size  # the smallest measured size
    prediction: Prediction
    sizes: Mapping[int, int | None]  # beyond what was measured; the nodes they need, if known
    notes: tuple[str, ...]  # what a reader must know beside the numbers

    def speed_up(self, ranks: float) -> Ends:
        """The speed-up over the base of the study."""
        value, low, high = self.prediction.speed_up(ranks)
        scale = self.base.speed_up or 1
        return scale * value, scale * low, scale * high


def forecasts(
    results: Results, wanted: Iterable[int], per_node: int | None = None, links: Links | None = None
) -> tuple[list[Forecast], list[str]]:
    """The predictions of the measured series for the wanted sizes beyond their largest ones.

    And why a size that was wanted has none. Of a world size with several node counts, the fewest
    nodes count. per_node: ranks of a full node (None: as on several). links: of jobkit comm.
    """
    measured = [s for s in results.sizes if s.speed_up is not None and s.world_size]
    made, reasons = list[Forecast](), list[str]()
    for series in dict.fromkeys(s.series for s in measured):
        curve = fewest_nodes(measured, series)
        try:
            forecast, lacks = _forecast(results, curve, sorted({*wanted}), per_node, links)
            made += [forecast] if forecast.sizes else []
        except UsageError as error:
            lacks = [str(error)]
        reasons += [f"{series}: {why}" for why in lacks]
    return made, reasons


def _forecast(
    results: Results, curve: list[Size], wanted: list[int], given: int | None, links: Links | None
) -> tuple[Forecast, list[str]]:
    """The forecast of a series, and what it lacks; raises UsageError where there is none."""
    if given and (most := max(s.ranks_per_node or 0 for s in curve)) > given:
        raise UsageError(f"measured with {most} ranks on a node, not --gpus-per-node {given}")
    several = [s.ranks_per_node or 1 for s in curve if (s.nodes or 1) > 1]
    per_node = given or max(several, default=None)
    planned = {s.world_size or 0: s for s in fewest_nodes(results.sizes, curve[0].series)}
    placed = [*curve] if given else [*planned.values(), *curve]
    nodes = {s.world_size or 0: s.nodes for s in placed if s.nodes}
    nodes = nodes if all(s.nodes for s in curve) else {}  # of per_node, else by draws

    def on(ranks: int) -> int | None:
        return nodes.get(ranks) or (math.ceil(ranks / per_node) if per_node else None)

    # One run slowed down by other jobs would distort the forecast.
    sound = [
        (s.world_size or 0, rate)
        for s in curve
        for run, rate in zip(s.rated_runs, s.rates, strict=True)
        if 0 < rate < math.inf and run not in (s.outliers or "").split(", ")
    ]
    largest = max((n for n, _ in sound), default=0)
    if not (beyond := [n for n in wanted if n > largest]):
        raise UsageError(f"measured up to {largest}")
    sent, lacks, notes = None, list[str](), list[str]()
    if links:
        try:
            sent = _sent_share(results, curve, links, on, beyond[-1])
        except UsageError as error:
            lacks.append(f"no measured links in its forecast: {error}")
    ranks, rates = [n for n, _ in sound], [rate for _, rate in sound]
    law = Prediction(ranks, rates, curve[0].scaling or "strong", per_node, sent, nodes)
    refusals = {n: law.refused(n) for n in beyond}
    facts, batch = FACTS.get(curve[0].strategy or ""), curve[0].global_batch_size or math.inf
    if facts and law.strong and not facts.splits_model:
        refusals |= {n: f"{n} ranks share a global batch of {batch}" for n in beyond if n > batch}
    sizes = {n: on(n) for n, why in refusals.items() if not why}
    guessed = not several and {*sizes.values()} - {1}
    if guessed and (per_node is None or (largest <= per_node and not sent)):
        several_nodes = f"no size of {curve[0].series} is known to be on several nodes"
        fix = "say --gpus-per-node" if None in sizes.values() else "measure one size on two nodes"
        notes.append(f"{several_nodes}: what communication between them costs is a guess: {fix}")
    failed = [planned[n] for n in sizes if n in planned and planned[n].not_ok]
    notes += [f"{failure(results, [s], 'ranks')}: the forecast ignores that" for s in failed]
    best = max(curve, key=lambda s: s.throughput or 0)
    if slower := [n for n in sizes if law.rate(n)[0] < (best.throughput or 0)]:
        place = f"on {' and '.join(map(str, slower))} ranks {best.series} is slower than on"
        notes.append(f"{place} {best.world_size}, which was measured: do not request more")
    lacks += filter(None, refusals.values())
    return Forecast(curve[0], law, sizes, tuple(notes)), lacks


def forecast_table(results: Results, forecasts: Sequence[Forecast]) -> pd.DataFrame:
    """A row for each series and size to forecast, with the columns FORECAST."""
    rows = []
    for forecast, ranks, nodes in ((f, *size) for f in forecasts for size in f.sizes.items()):
        base, measured = forecast.base, forecast.prediction.sizes
        row: Row = {n: getattr(base, n) for n in ("series", "throughput_unit", "time_of")}
        law = "measured links" if forecast.prediction.sent else "average"
        row |= {"study": results.name, "law": law, "measured_sizes": ", ".join(map(str, measured))}
        row |= {"times_beyond": ranks / measured[-1], "world_size": ranks, "nodes": nodes}
        rates, speed_ups = forecast.prediction.rate(ranks), forecast.speed_up(ranks)
        # The lower end of a rate is the upper one of a time.
        ends = (("", ""), ("_low", "_high"), ("_high", "_low"))
        for (end, of_time), rate, speed_up in zip(ends, rates, speed_ups, strict=True):
            row |= {f"throughput{end}": rate, f"speed_up{end}": speed_up}
            row[f"efficiency{end}"] = speed_up * (base.base_world_size or 1) / ranks
            time_s = (base.time_amount or math.nan) / rate  # NaN: an empty cell
            row[f"time{of_time}_s"] = time_s
            row[f"node_hours{of_time}"] = time_s * nodes / 3600 if nodes else None
        rows.append(row)
    return frame(rows, FORECAST)


def links_of(lines: Iterable[Line]) -> Links:
    """The links inside a node and between nodes, from the lines fitted to one comm.csv or several.

    From its all_reduce, by the ring's formula, where all its ranks were on one node, or each on
    one of its own: then the sums that a reduction makes are included. Else from sendrecv. Of
    several measurements the one on most ranks counts. Raises UsageError where none is usable.
    """
    links: dict[bool, Link] = {}  # whether it is inside a node
    good = [line for line in lines if not line.is_bad]
    for line in sorted(good, key=lambda line: (line.operation != "sendrecv", line.ranks)):
        ring = line.operation in ("sendrecv", "all_reduce") and line.ranks > 1
        if ring and line.nodes in (1, line.ranks):
            hops = passes(line.operation) * (line.ranks - 1)
            s_per_byte = line.s_per_byte / bus_factor(line.operation, line.ranks)
            links[line.nodes == 1] = Link(line.latency_s / hops, s_per_byte)
    if not good:
        why = "no line fits its sizes within 50 % with a bandwidth that is finite"
        raise UsageError(f"--comm: {why}: measure on idle nodes again, with a larger --max-bytes")
    return Links(links.get(True), links.get(False))


def _sent_share(
    results: Results, curve: list[Size], links: Links, on: Callable[[int], int | None], last: int
) -> Callable[[float], float]:
    """The time of a step's messages at a size, over the time of a step at the smallest one.

    FSDP's shard groups count as equal in size. on: nodes of a size. last: the largest one wanted.
    """
    first, run = curve[0], results.rows[curve[0].ok_runs[0]]
    spec = read_run_spec(results.paths.run(run["run_id"]).folder)
    settings: Row = spec.decided(run).to_dict() if isinstance(spec, RunSpec) else {}
    bytes_fp32, groups = 4 * (run.get("parameters") or 0), int(run.get("shard_groups") or 0)
    each = (bytes_fp32 / groups,) if groups else ()  # the last one stays gathered
    size = ModelSize(parameters=bytes_fp32, shard_groups=each * (groups - 1), kept_groups=each)
    own = FACTS.get(settings.get("strategy", ""))
    if settings.get("ddp_comm_hook") == "powersgd":
        raise UsageError("what the hook powersgd sends does not follow from the size")
    if not (own and bytes_fp32 and first.global_batch_size) or own.messages(settings, size) is None:
        raise UsageError("what it sends is known of ddp and fsdp alone, by settings and parameters")
    step_s = (first.global_batch_size or 0) / (first.throughput or 1)

    def share(ranks: float) -> float:
        n = max(1, round(ranks))
        nodes = on(n) or 1
        place = {"nodes": nodes, "ranks_per_node": math.ceil(n / nodes)}
        return seconds(own.messages(settings | place, size) or (), links) / step_s

    for n in (*(s.world_size or 1 for s in curve), last):
        share(n)  # raises UsageError where a link is not known
    return share
