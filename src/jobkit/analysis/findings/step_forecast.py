"""Which of two forecasts is taken: the average of laws, or the step model with measured links."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.forecast import NO_INTERVAL, STEP, Beyond, Forecast
from jobkit.analysis.findings.step_fit import Point
from jobkit.analysis.findings.step_model import SeriesSteps, messages
from jobkit.analysis.scaling.predict import MIN_SIZES, predict
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import rounded
from jobkit.errors import UsageError
from jobkit.spec.traffic import Links, seconds


def decided(
    results: Results, found: Sequence[Forecast], steps: Sequence[SeriesSteps], links: Links
) -> tuple[list[Forecast], list[str]]:
    """The forecasts, with the step model's values where it is taken, and a sentence for each size.

    A sentence has both forecasts, which is taken, and why.
    """
    models = {one.series: one for one in steps}
    rows = {
        run_id: {**results.settings(run_id), **row}
        for row in records(results.runs)
        if (run_id := str(row["run_id"]))
    }
    made, said = [], []
    for one in found:
        own = models.get(one.series)
        if own is None or own.model is None:
            why = own.refused if own else "it was not measured"
            said += [f"{one.series}: the average of laws is taken: no step model: {why}"] * bool(
                one.sizes
            )
            made.append(one)
            continue
        law, run = _law_error(results, one), rows[one.base.ok_runs[0]]
        taken = {}
        for ranks in one.sizes:
            rate = _rate(one, own, ranks, run, links)
            by_steps, why = _choice(one, own, ranks, rate, law)
            said.append(f"{one.series} at {ranks} ranks: {why}")
            if by_steps and not isinstance(rate, str):
                taken[ranks] = _by_steps(one, own, ranks, rate)
        made.append(replace(one, by_steps=taken))
    return made, said


def _choice(
    one: Forecast, own: SeriesSteps, ranks: int, rate: float | str, law: float
) -> tuple[bool, str]:
    """Whether the step model is taken for a size, and why, with both forecasts."""
    assert one.prediction is not None
    step, average = own.tests[-1].error_share, rounded(one.prediction.rate(ranks))
    if isinstance(rate, str):
        return False, f"the average of laws is taken, {average}: no step model there: {rate}"
    both = f"step model {rounded(rate)}, average of laws {average} {one.base.throughput_unit}"
    last = f"the held-out {own.tests[-1].ranks} ranks"
    if one.nodes == 1 and one.per_node and ranks > one.per_node:
        why = "it has the measured link between nodes, which no measured size crosses"
        return True, f"{both}; the step model is taken: {why}; it missed {last} by {step:+.1%}"
    if math.isnan(law):
        why = f"{MIN_SIZES + 1} sizes are needed to test it"
        return False, f"{both}; the average of laws is taken: {why}"
    better = abs(step) < abs(law)
    taken = "step model" if better else "average of laws"
    why = f"of {last} the step model missed the time by {step:+.1%}, the laws by {law:+.1%}"
    return better, f"{both}; the {taken} is taken: {why}"


def _by_steps(one: Forecast, own: SeriesSteps, ranks: int, rate: float) -> Beyond:
    """The step model's forecast of a size; it says no interval, but what it missed."""
    last, base = own.tests[-1], one.base.throughput or math.nan
    missed = f"the time of the held-out {last.ranks} ranks by {last.error_share:+.1%}"
    return Beyond(STEP, (rate, *NO_INTERVAL), (rate / base, *NO_INTERVAL), missed)


def _rate(
    one: Forecast, own: SeriesSteps, ranks: int, run: dict[str, Any], links: Links
) -> float | str:
    """What the step model predicts, in units of work per second; or why it cannot.

    Never above ideal scaling from the smallest measured size.
    """
    per_node = min(one.per_node or ranks, ranks)
    nodes = -(-ranks // per_node)
    batch = one.base.global_batch_size
    if one.scaling == "weak" and one.base.batch_size_per_rank:
        batch = one.base.batch_size_per_rank * ranks
    if nodes * per_node != ranks or not batch or own.model is None:
        return f"{ranks} ranks do not fill nodes of {per_node}" if batch else "no batch size"
    try:
        sent = seconds(messages(run | {"nodes": nodes, "ranks_per_node": per_node}), links)
    except UsageError as error:
        return str(error)
    made = batch / own.model.step_s(Point(ranks, batch / ranks, sent, math.nan))
    ideal = (one.base.throughput or math.inf) * ranks / (one.base.world_size or 1)
    return min(made, ideal)


def _law_error(results: Results, one: Forecast) -> float:
    """By how much the time of the largest size is missed from all smaller ones; NaN: too few."""
    sizes: dict[int, Size] = {}
    for size in results.sizes:
        if size.series == one.series and size.world_size in one.measured:
            sizes.setdefault(size.world_size, size)
    last = max(one.measured)
    runs = [(n, x) for n, s in sizes.items() for x in _sound(s) if n < last]
    if len({n for n, _ in runs}) < MIN_SIZES or not sizes[last].throughput:
        return math.nan
    nodes = {n: size.nodes or 1 for n, size in sizes.items()}
    ranks, rates = [n for n, _ in runs], [x for _, x in runs]
    made = predict(ranks, rates, one.scaling, one.per_node, nodes)
    return (sizes[last].throughput or math.nan) / made.rate(last) - 1


def _sound(size: Size) -> Iterable[float]:
    """The rates of a size without outliers."""
    wrong = (size.outliers or "").split(", ")
    pairs = zip(size.rated_runs, size.rates, strict=True)
    return (x for run, x in pairs if run not in wrong and 0 < x < math.inf)
