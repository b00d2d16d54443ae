"""The conclusions of a study: the fastest strategy, how far it scales, what size to request."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.breakdowns import causes
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import counted_ranks, rounded, with_interval

LEAST = 0.8  # the parallel efficiency that a size to request must have
_MANY = 5  # series of which each has a sentence; with more, only the best
_Row = dict[str, Any]


def verdict(
    results: Results, unit: str, least: float = LEAST, forecasts: Sequence[Forecast] = ()
) -> list[str]:
    """The sentences, the most important first. unit: GPUs, or processes (ranks)."""
    rows = [r for r in records(results.scaling) if pd.notna(r["images_per_s"])]
    if not rows:
        return ["Nothing was measured: no successful run has finished an epoch.", _runs(results)]
    said: list[str] = []
    why = causes(results)
    for row in rows:
        row["why"] = why.get((row["series"], row["world_size"], row["nodes"]), "")
    for scaling in dict.fromkeys(str(r["scaling"]) for r in rows if pd.notna(r["scaling"])):
        said += _of_scaling([r for r in rows if r["scaling"] == scaling], scaling, unit, least)
    if results.scaling["spread_from"].isna().all():
        said.append("Each size was measured once, so differences may be noise. Repeat the runs.")
    said += [line for f in forecasts for line in _beyond(f, unit)]
    return [*said, _runs(results)]


def _of_scaling(rows: list[_Row], scaling: str, unit: str, least: float) -> list[str]:
    """The best series of one kind of scaling, and what to ask for; then each series' limit."""
    best = max(rows, key=lambda r: r["images_per_s"])
    line = (
        f"{scaling.capitalize()} scaling: the fastest is {best['series']} on "
        f"{_size(best, unit)}, with {rounded(best['images_per_s'])} images per second"
    )
    others = best["not_distinguishable_from"]
    line += f"; its interval overlaps that of {others}." if pd.notna(others) else "."
    names = list(dict.fromkeys(r["series"] for r in (best, *rows)))
    shown = names if len(names) <= _MANY else names[:1]
    limits = [_limit([r for r in rows if r["series"] == name], unit, least) for name in shown]
    if len(shown) < len(names):
        limits.append(f"For the other {len(names) - len(shown)} series, see the table.")
    return [line, *_ask(rows, best, unit, least), *limits]


def _ask(rows: list[_Row], best: _Row, unit: str, least: float) -> list[str]:
    """The largest size of the best series up to which every size is efficient enough, in words."""
    line = [r for r in rows if r["series"] == best["series"] and pd.notna(r["efficiency"])]
    within = _within(line, least)
    if len(line) < 2:
        return [f"{best['series']} was measured at one size only: its scaling is unknown."]
    if not within:
        return []
    row = within[-1]
    text = f"Request {_size(row, unit)} with {row['series']}: "
    if row is line[0]:
        return [f"{text}the next size is already below {least:.0%} parallel efficiency."]
    text += f"speed-up {with_interval(row, 'speed_up', '{:.2f}')}, "
    text += f"parallel efficiency {with_interval(row, 'efficiency', '{:.0%}')}"
    if pd.notna(row["time_per_epoch_s"]):
        text += f", {row['time_per_epoch_s']:.4g} s and {row['node_hours_per_epoch']:.3g} "
        text += "node-hours per epoch"
    return [f"{text}."]


def _limit(line: list[_Row], unit: str, least: float) -> str:
    """Where the efficiency of a series falls below the threshold, and why."""
    name, first = line[0]["series"], line[0]
    if pd.isna(first["efficiency"]):
        return f"{name}: {first['note']}."
    below = [r for r in line if r["efficiency"] < least]
    if below:
        row = below[0]
        unsure = pd.notna(row["efficiency_high"]) and row["efficiency_high"] >= least
        return (
            f"{name} falls below {least:.0%} parallel efficiency at {_size(row, unit)}: "
            f"{with_interval(row, 'efficiency', '{:.1%}')}"
            f"{' (the interval includes it)' if unsure else ''}{row['why']}."
        )
    if len(line) < 2:
        return f"{name} was measured at {_size(first, unit)} only."
    last = line[-1]
    return (
        f"{name} has at least {least:.0%} parallel efficiency up to the largest measured size, "
        f"{_size(last, unit)}: {with_interval(last, 'efficiency', '{:.1%}')}."
    )


def _within(line: list[_Row], least: float) -> list[_Row]:
    """The sizes before the first one that is not efficient enough."""
    kept: list[_Row] = []
    for row in line:
        if row["efficiency"] < least:
            break
        kept.append(row)
    return kept


def _beyond(one: Forecast, unit: str) -> list[str]:
    """The forecast for the largest size, what it does not know first; why others have none."""
    said = [f"No forecast of {why}." for why in one.reasons]
    if not one.sizes or one.prediction is None:
        return said
    ranks = one.sizes[-1]
    value, low, high = one.prediction.speed_up(ranks)
    caution = f"{one.caution[0].upper()}{one.caution[1:]}. " if one.caution else ""
    base = counted_ranks(one.base.world_size or 1, unit)
    text = f"{caution}Forecast, not measured: {one.series} on {counted_ranks(ranks, unit)}: "
    text += f"speed-up {value:.3g} over {base}, 95% prediction interval [{low:.3g}, {high:.3g}]."
    return [text, *said]


def _runs(results: Results) -> str:
    bad = results.runs["status"][results.runs["status"] != "ok"].value_counts()
    total = len(results.runs)
    if bad.empty:
        return f"All {total} planned runs are ok." if total > 1 else "The one planned run is ok."
    others = ", ".join(f"{n} {status}" for status, n in sorted(bad.items()))
    return f"{total - int(bad.sum())} of {total} planned runs are ok; {others}."


def _size(row: _Row, unit: str) -> str:
    """How many GPUs and, where there are several nodes, on how many nodes."""
    on = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
    return f"{counted_ranks(int(row['world_size']), unit)}{on}"
