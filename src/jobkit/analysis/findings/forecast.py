"""Predictions of a study for sizes that were not measured.

Forecast is their one owner: the table, the terminal, the report and the figure show what it gives.
Where jobkit comm measured the links, what a step sends takes its time over them.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.predict import Ends, Prediction
from jobkit.analysis.scaling.sizes import Size, fewest_nodes
from jobkit.analysis.tables.columns import FORECAST
from jobkit.analysis.tables.frames import Row, frame
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError
from jobkit.metric.comm import Line, fit_lines, read_csv
from jobkit.spec.runspec import SETTINGS
from jobkit.spec.strategies import FACTS
from jobkit.spec.study import read_run_spec
from jobkit.spec.traffic import Link, Links, Message, ModelSize, seconds
from jobkit.units import bus_factor, passes

# What a forecast is made with, in the column law, and in words.
LAWS, LINKS = "average", "measured links"
SOURCES = {LAWS: "average of laws", LINKS: "average of laws with the measured links"}
_FP32 = 4  # bytes


@dataclass(frozen=True)
class Forecast:
    """The prediction for larger sizes of one series."""

    base: Size  # the smallest measured size
    prediction: Prediction
    nodes_hold: int | None  # ranks; None: not known
    sizes: tuple[int, ...]  # to forecast; all beyond what was measured
    law: str
    notes: tuple[str, ...]  # what a reader must know beside the numbers

    def speed_up(self, ranks: float) -> Ends:
        """The speed-up over the base of the study."""
        value, low, high = self.prediction.speed_up(ranks)
        scale = self.base.speed_up or 1
        return scale * value, scale * low, scale * high

    def nodes_of(self, ranks: int) -> int | None:
        """How many nodes that many ranks need."""
        return math.ceil(ranks / self.nodes_hold) if self.nodes_hold else None


def forecasts(
    results: Results,
    wanted: Sequence[int],
    per_node: int | None = None,
    links: Links | None = None,
) -> tuple[list[Forecast], list[str]]:
    """The predictions of the measured series for the wanted sizes beyond their largest ones.

    And why a size that was wanted has none. Of a world size with several node counts, the fewest
    nodes count. per_node: ranks of a full node; None: as many as the measured sizes have that are
    on several. links: measured by jobkit comm. Raises UsageError where per_node contradicts a
    measured size.
    """
    measured = [s for s in results.sizes if s.speed_up is not None and s.world_size]
    made, reasons = list[Forecast](), list[str]()
    for series in dict.fromkeys(s.series for s in measured):
        curve = fewest_nodes(measured, series)
        for size in curve:
            if per_node and size.nodes and (size.world_size or 0) > per_node * size.nodes:
                raise UsageError(
                    f"--gpus-per-node {per_node}: {series} was measured with {size.world_size} "
                    f"ranks on {counted(size.nodes, 'node')}"
                )
        try:
            forecast, refusals = _forecast(results, curve, wanted, per_node, links)
            made += [forecast] if forecast.sizes else []
        except UsageError as error:
            refusals = [str(error)]
        reasons += [f"{series}: {why}" for why in refusals]
    return made, reasons


def _forecast(
    results: Results,
    curve: list[Size],
    wanted: Sequence[int],
    given: int | None,
    links: Links | None,
) -> tuple[Forecast, list[str]]:
    """The forecast of a series, and what it lacks; raises UsageError where there is none."""
    series, several = curve[0].series, [s for s in curve if (s.nodes or 1) > 1]
    nodes = {s.world_size or 0: s.nodes for s in curve if s.nodes}
    nodes = nodes if len(nodes) == len(curve) else {}  # of per_node, else by draws
    per_node = given or max((s.ranks_per_node or 1 for s in several), default=None)
    # One run slowed down by other jobs would distort the forecast.
    sound = [
        (s.world_size or 0, rate)
        for s in curve
        for run, rate in zip(s.rated_runs, s.rates, strict=True)
        if rate > 0 and run not in (s.outliers or "").split(", ")
    ]
    largest = max((n for n, _ in sound), default=0)
    if not (beyond := sorted({n for n in wanted if n > largest})):
        raise UsageError(f"measured up to {largest}")
    sent, reasons, notes = None, list[str](), list[str]()
    if links:
        try:
            sent = _sent_share(results, curve, links, per_node, beyond[-1])
        except UsageError as error:
            reasons.append(f"no measured links in its forecast: {error}")
    ranks, rates = [n for n, _ in sound], [rate for _, rate in sound]
    law = Prediction(ranks, rates, curve[0].scaling or "strong", per_node, sent, nodes)
    refusals = {n: law.refused(n) for n in beyond}
    sizes = tuple(n for n, why in refusals.items() if not why)
    reasons += filter(None, refusals.values())
    if per_node is None or (largest <= per_node < beyond[-1] and not (several or sent)):
        notes.append(
            f"no size of {series} is known to be on several nodes: what communication between them "
            "costs is a guess (--gpus-per-node says where nodes end, --comm has measured links)"
        )
    fastest = max(curve, key=lambda s: s.throughput or 0)
    if slower := [n for n in sizes if law.rate(n)[0] < (fastest.throughput or 0)]:
        notes.append(
            f"on {' and '.join(map(str, slower))} ranks {series} is slower than on "
            f"{fastest.world_size}, which was measured: do not request more"
        )
    on_one = max(s.ranks_per_node or 1 for s in curve) if nodes else None
    kind = LINKS if sent else LAWS
    return Forecast(curve[0], law, per_node or on_one, sizes, kind, tuple(notes)), reasons


def forecast_table(results: Results, forecasts: Sequence[Forecast]) -> pd.DataFrame:
    """A row for each series and size to forecast, with the columns FORECAST."""
    rows = []
    for forecast, ranks in ((f, n) for f in forecasts for n in f.sizes):
        base, nodes, measured = forecast.base, forecast.nodes_of(ranks), forecast.prediction.sizes
        row: Row = {
            **{name: getattr(base, name) for name in ("series", "throughput_unit", "time_of")},
            "study": results.name,
            "law": forecast.law,
            "measured_sizes": ", ".join(map(str, measured)),
            "times_beyond": ranks / measured[-1],
            "world_size": ranks,
            "nodes": nodes,
        }
        rates, speed_ups = forecast.prediction.rate(ranks), forecast.speed_up(ranks)
        # The lower end of a rate is the upper one of a time.
        ends = (("", ""), ("_low", "_high"), ("_high", "_low"))
        for (end, of_time), rate, speed_up in zip(ends, rates, speed_ups, strict=True):
            row |= {f"throughput{end}": rate, f"speed_up{end}": speed_up}
            row[f"efficiency{end}"] = speed_up * (base.base_world_size or 1) / ranks
            if base.time_amount:
                time_s = base.time_amount / rate
                row[f"time{of_time}_s"] = time_s
                row[f"node_hours{of_time}"] = time_s * nodes / 3600 if nodes else None
        rows.append(row)
    return frame(rows, FORECAST)


def read_links(paths: Sequence[Path]) -> Links:
    """The links in one comm.csv or several; raises UsageError where none is usable."""
    lines = [line for path in paths for line in fit_lines(read_csv(path))]
    if not (good := [line for line in lines if not line.is_bad]):
        raise UsageError(
            "--comm: no line fits its sizes within 50 %: measure the links again on idle nodes"
        )
    return links_of(good)


def links_of(lines: Sequence[Line]) -> Links:
    """The links inside a node and between nodes, from the lines of a comm.csv.

    From its all_reduce, by the ring's formula, where all its ranks were on one node, or each on
    one of its own: then the sums that a reduction makes are included. Else from sendrecv. Of
    several measurements the one on most ranks counts.
    """
    links: dict[str, Link] = {}
    for line in sorted(lines, key=lambda line: (line.operation != "sendrecv", line.ranks)):
        if line.operation == "sendrecv":
            links[line.scope] = Link(line.latency_s, line.s_per_byte)
        elif line.operation == "all_reduce" and line.ranks > 1 and line.nodes in (1, line.ranks):
            hops = passes(line.operation) * (line.ranks - 1)
            s_per_byte = line.s_per_byte / bus_factor(line.operation, line.ranks)
            scope = "intra_node" if line.nodes == 1 else "inter_node"
            links[scope] = Link(line.latency_s / hops, s_per_byte)
    return Links(links.get("intra_node"), links.get("inter_node"))


def messages(run: Row) -> list[Message]:
    """The messages of one optimizer step. run: its settings, parameters and shard_groups.

    FSDP's shard groups count as equal in size; where their number was not recorded, as one. Raises
    UsageError for what does not follow from the settings.
    """
    settings = {name: run.get(name) for name in SETTINGS}
    groups, sent = int(run.get("shard_groups") or 0), None
    parameters = _FP32 * int(run.get("parameters") or 0)
    each = (parameters / groups,) if groups else ()  # the last one stays gathered
    size = ModelSize(parameters=parameters, shard_groups=each * (groups - 1), kept_groups=each)
    with suppress(KeyError, TypeError):  # a setting that decides the traffic is not recorded
        sent = FACTS[str(settings["strategy"])].messages(settings, size) if parameters else None
    if sent is None:
        raise UsageError(
            "what it sends is known of ddp (without PowerSGD) and fsdp alone, if their logs say "
            "the settings and parameters"
        )
    return sent


def _sent_share(
    results: Results, curve: Sequence[Size], links: Links, per_node: int | None, last: int
) -> Callable[[float], float]:
    """The time of a step's messages at a size, over the time of a step at the smallest one.

    last: the largest size that is asked for. Raises UsageError where it is not known.
    """
    first, run_id = curve[0], curve[0].ok_runs[0]
    places = {s.world_size: (s.nodes, s.ranks_per_node or 1) for s in curve if s.nodes}
    spec = read_run_spec(results.paths.run(run_id).folder)
    settings = {**(spec.to_dict() if spec else {}), **results.rows[run_id]}
    if not first.global_batch_size or not first.throughput:
        raise UsageError("the logs do not say the batch of every size")
    step_s = first.global_batch_size / first.throughput

    def share(ranks: float) -> float:
        n = max(1, round(ranks))
        full = min(per_node or n, n)
        nodes, each = places.get(n) or (math.ceil(n / full), full)
        place = {"nodes": nodes, "ranks_per_node": each, "world_size": n}
        return seconds(messages(settings | place), links) / step_s

    for n in (*(s.world_size or 1 for s in curve), last):
        share(n)
    return share
