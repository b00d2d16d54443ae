"""Predictions of a study for sizes that were not measured.

Forecast.at is the one owner of a forecast: the table, the terminal, the report and the figure show
what it gives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.links import sent_share
from jobkit.analysis.scaling.predict import MIN_SIZES, Prediction, predict
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.columns import FORECAST
from jobkit.analysis.tables.frames import Row, frame, records
from jobkit.analysis.tables.text import counted, say
from jobkit.errors import UsageError
from jobkit.spec.traffic import Links

# What a forecast is made with, in the column law, and in words.
LAWS, LINKS = "average", "measured links"
SOURCES = {LAWS: "average of laws", LINKS: "average of laws with the measured links"}


@dataclass(frozen=True)
class Beyond:
    """The forecast of one size: each value with the ends of its interval."""

    rate: tuple[float, float, float]  # in the unit of the series
    speed_up: tuple[float, float, float]  # over the base


@dataclass(frozen=True)
class Forecast:
    """The prediction for larger sizes of one series."""

    series: str
    base: Size  # the smallest measured size
    measured: tuple[int, ...]
    fastest: Size  # of the measured sizes
    sizes: tuple[int, ...] = ()  # to forecast; all beyond what was measured
    left_out: int = 0  # runs that are outliers: not fitted
    prediction: Prediction | None = None  # none: too few sizes, or none is wanted
    reasons: tuple[str, ...] = ()  # why a size that was wanted is not among sizes
    nodes: int = 1  # the most that a measured size had
    per_node: int | None = None  # ranks of a full node; None: not known
    elsewhere: bool = False  # whether more nodes were measured too, with as many ranks
    law: str = LAWS
    missed: float | None = None  # by how much all smaller sizes miss the largest one's rate

    def at(self, ranks: float) -> Beyond:
        """The forecast of one size."""
        made, scale = self.prediction, self.base.speed_up or 1
        assert made is not None  # it has sizes
        middle, low, high = (scale * value for value in made.speed_up(ranks))
        return Beyond((made.rate(ranks), *made.interval(ranks)), (middle, low, high))

    def nodes_of(self, ranks: int) -> int:
        """How many nodes that many ranks need."""
        return math.ceil(ranks / (self.per_node or self.base.ranks_per_node or ranks))

    @property
    def caution(self) -> str:
        """What a reader must know before the numbers; empty where there is nothing."""
        if self.nodes > 1 or (self.law == LINKS and self.per_node):
            return ""
        if self.per_node is None:
            text = f"every measured size of {self.series} is on one node"
            if self.elsewhere:
                text = f"the forecast of {self.series} uses its sizes on one node only"
            return (
                f"{text}, so what communication between nodes costs is not known "
                "(--gpus-per-node says where nodes end)"
            )
        across = [n for n in self.sizes if n > self.per_node]
        if not across:
            return ""
        return (
            f"the forecast of {self.series} crosses from one node to {self.nodes_of(across[-1])}, "
            "which no size it is made from does: what communication between nodes costs is taken "
            "from published tables (--comm has measured links)"
        )

    @property
    def remarks(self) -> list[str]:
        """Sizes that are slower than what was measured, and how well the largest size was met."""
        best, lines = self.fastest.throughput or 0, []
        slower = [n for n in self.sizes if self.at(n).rate[0] < best]
        if slower:
            at = " and ".join(map(str, slower))
            lines.append(
                f"{self.series} is slower on {at} ranks than on {self.fastest.world_size}, which "
                "was measured: do not request more"
            )
        if self.missed is not None:
            lines.append(
                f"{self.series}: from its smaller sizes the same law misses the rate on "
                f"{self.measured[-1]} ranks by {self.missed:+.1%}"
            )
        return lines


def forecasts(
    results: Results,
    wanted: Sequence[int] = (),
    per_node: int | None = None,
    links: Links | None = None,
) -> list[Forecast]:
    """The prediction of every measured series for the wanted sizes beyond its largest one.

    Of a world size with several node counts, the fewest nodes count. per_node: ranks of a full
    node; None: as many as the measured sizes have that are on several. links: measured by jobkit
    comm. Raises UsageError where per_node contradicts a measured size.
    """
    curves: dict[str, dict[int, Size]] = {}
    elsewhere = set()
    for size in results.sizes:
        if size.speed_up is not None and size.world_size:
            curve = curves.setdefault(size.series, {})
            if curve.setdefault(size.world_size, size) is not size:
                elsewhere.add(size.series)
    made = [_forecast(results, [*c.values()], wanted, per_node, links) for c in curves.values()]
    return [replace(f, elsewhere=f.series in elsewhere) for f in made]


def checked_forecasts(
    results: Results,
    wanted: Sequence[int],
    per_node: int | None = None,
    links: Links | None = None,
) -> list[Forecast]:
    """The forecasts; raises UsageError with the reason where no series has one."""
    made = forecasts(results, wanted, per_node, links)
    if any(f.sizes for f in made):
        return made
    reasons = [reason for f in made for reason in f.reasons]
    raise UsageError(f"no forecast: {'; '.join(reasons) or 'no series has sizes to compare'}")


def _forecast(
    results: Results,
    curve: list[Size],
    wanted: Sequence[int],
    given: int | None,
    links: Links | None,
) -> Forecast:
    runs = [
        (s.world_size or 0, rate, run in (s.outliers or "").split(", "))
        for s in curve
        for run, rate in zip(s.rated_runs, s.rates, strict=True)
        if 0 < rate < math.inf  # it comes from a log
    ]
    # One run slowed down by other jobs would distort the forecast.
    sound = [(n, rate) for n, rate, wrong in runs if not wrong]
    first, measured = curve[0], tuple(sorted({n for n, _ in sound}))
    beyond = sorted({n for n in wanted if n > max(measured, default=0)})
    nodes, per_node = {s.world_size or 0: s.nodes or 1 for s in curve}, _per_node(curve, given)
    forecast = Forecast(
        series=first.series,
        base=first,
        measured=measured,
        fastest=max(curve, key=lambda s: s.throughput or 0),
        left_out=len(runs) - len(sound),
        nodes=max(nodes.values()),
        per_node=per_node,
    )
    if not wanted:
        return forecast
    if not beyond or len(measured) < MIN_SIZES:
        sizes = ", ".join(map(str, measured)) or "none"
        why = f"measured up to {max(measured, default=0)}"
        if len(measured) < MIN_SIZES:
            why = f"{MIN_SIZES} different sizes are needed for a fit (measured: {sizes})"
        return replace(forecast, reasons=(f"{first.series}: {why}",))
    sent, reasons = None, []
    try:
        sent = sent_share(results, curve, links, per_node, beyond[-1]) if links else None
    except UsageError as error:
        reasons.append(f"{first.series}: no measured links in its forecast: {error}")

    def fit(last: int) -> Prediction:
        used = [(n, x) for n, x in sound if n <= last]
        scaling = first.scaling or "strong"
        ranks, rates = [n for n, _ in used], [x for _, x in used]
        return predict(ranks, rates, scaling, per_node, nodes, sent)

    made, missed = fit(measured[-1]), None
    if len(measured) > MIN_SIZES and curve[-1].throughput:
        missed = fit(measured[-2]).rate(measured[-1]) / curve[-1].throughput - 1
    refusals = {n: made.refused(n) for n in beyond}
    reasons += [f"{first.series}: {why}" for why in refusals.values() if why]
    return replace(
        forecast,
        sizes=tuple(n for n, why in refusals.items() if not why),
        prediction=made,
        reasons=tuple(reasons),
        law=LINKS if sent else LAWS,
        missed=missed,
    )


def _per_node(curve: Sequence[Size], given: int | None) -> int | None:
    """The ranks of a full node; None: not known. Raises UsageError where given contradicts it."""
    for size in curve:
        if given and (size.world_size or 0) > given * (size.nodes or 1):
            raise UsageError(
                f"--gpus-per-node {given}: {size.series} was measured with {size.world_size} "
                f"ranks on {counted(size.nodes or 1, 'node')}"
            )
    across = [s.ranks_per_node or 1 for s in curve if (s.nodes or 1) > 1]
    return given or max(across, default=None)


def forecast_table(results: Results, made: Sequence[Forecast]) -> pd.DataFrame:
    """A row for each series and size to forecast, with the columns FORECAST."""
    return frame([_row(f, n) | {"study": results.name} for f in made for n in f.sizes], FORECAST)


def _row(forecast: Forecast, ranks: int) -> Row:
    beyond, base, nodes = forecast.at(ranks), forecast.base, forecast.nodes_of(ranks)
    row: Row = {
        "series": forecast.series,
        "kind": "forecast",
        "law": forecast.law,
        "measured_sizes": ", ".join(map(str, forecast.measured)),
        "times_beyond": ranks / max(forecast.measured),
        "world_size": ranks,
        "nodes": nodes,
        "outliers_left_out": forecast.left_out,
        "throughput_unit": base.throughput_unit,
        "time_of": base.time_of,
    }
    ends = ("", "_low", "_high")
    for end, rate, speed_up in zip(ends, beyond.rate, beyond.speed_up, strict=True):
        row |= {f"throughput{end}": rate, f"speed_up{end}": speed_up}
        row[f"efficiency{end}"] = speed_up * (base.base_world_size or 1) / ranks
    if amount := base.time_amount:
        times = [amount / rate for rate in beyond.rate]
        row["time_s"], row["time_high_s"], row["time_low_s"] = times
        hours = [time * nodes / 3600 for time in times]
        row["node_hours"], row["node_hours_high"], row["node_hours_low"] = hours
    return row


def forecast_lines(made: Sequence[Forecast], table: pd.DataFrame) -> list[str]:
    """One line for each forecast, for a terminal, and the remarks on them."""
    lines = [
        f"forecast (not measured): {row['series']} at {row['world_size']} ranks on "
        f"{counted(row['nodes'], 'node')}: speed-up {row['speed_up']:.3g} "
        f"[{row['speed_up_low']:.3g}, {row['speed_up_high']:.3g} at 95%], parallel efficiency "
        f"{row['efficiency']:.0%}, {say(row['node_hours'], '{:.3g}')} node-hours per "
        f"{row['time_of']} ({SOURCES[row['law']]}, from {row['measured_sizes']}{_without(row)})"
        for row in records(table)
    ]
    return lines + [f"forecast: {remark}" for f in made for remark in f.remarks]


def _without(row: Row) -> str:
    count = row["outliers_left_out"]
    return f", without {counted(count, 'outlier')}" if count else ""
