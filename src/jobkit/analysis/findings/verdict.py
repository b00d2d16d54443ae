"""The conclusions of a study: the fastest strategy, how far it scales, what size to request."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.breakdowns import causes
from jobkit.analysis.findings.chance import by_chance
from jobkit.analysis.findings.disturbed import shared_nodes
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.findings.repeats import more_repeats
from jobkit.analysis.findings.stragglers import uneven_steps
from jobkit.analysis.tables.comparable import mixed
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import counted_ranks, per_second, rounded, say

LEAST = 0.8  # the parallel efficiency that a size to request must have
_SUPERLINEAR = 1.05  # an efficiency above this is remarked
_MANY = 5  # series of which each has a sentence; with more, only the best
_Row = dict[str, Any]


def verdict(
    results: Results, unit: str, least: float = LEAST, forecasts: Sequence[Forecast] = ()
) -> list[str]:
    """The sentences, the most important first. unit: GPUs, or processes (ranks)."""
    rows = [r for r in records(results.scaling) if pd.notna(r["throughput"])]
    if not rows:
        return ["Nothing was measured: no successful run has a rate.", _runs(results)]
    said: list[str] = []
    why = causes(results)
    for row in rows:
        row["why"] = why.get((row["series"], row["world_size"], row["nodes"]), "")
    for kind in dict.fromkeys(map(_kind, rows)):
        own = [r for r in rows if _kind(r) == kind]
        said += _of_scaling(own, kind[0], unit, least)
        said[-1:-1] = more_repeats(results, _best(own)["series"], least, unit)
    said[1:1] = shared_nodes(results)
    said += by_chance(results)
    said += [line for f in forecasts for line in _beyond(f, unit)]
    return [*mixed(results.runs), *said, *uneven_steps(results, unit), _runs(results)]


def _of_scaling(rows: list[_Row], scaling: str, unit: str, least: float) -> list[str]:
    """The best series of one kind of scaling, and what to ask for; then each series' limit."""
    best = _best(rows)
    line = (
        f"{_title(scaling)}: the fastest is {best['series']} on {_size(best, unit)}, "
        f"with {rounded(best['throughput'])} {per_second(best['throughput_unit'])}"
    )
    others = best["not_distinguishable_from"]
    alike: bool = pd.notna(best["spread_from"]) and pd.notna(others)
    line += f"; not told apart from {others} at 95% confidence." if alike else "."
    names: list[str] = list(dict.fromkeys(r["series"] for r in (best, *rows)))
    shown = names if len(names) <= _MANY else names[:1]
    limits = [
        text for n in shown for text in _limits([r for r in rows if r["series"] == n], unit, least)
    ]
    if len(shown) < len(names):
        limits.append(f"For the other {len(names) - len(shown)} series, see the table.")
    return [line, *_ask(rows, best, unit, least), *limits]


def _kind(row: _Row) -> tuple[str, str]:
    """What rows share that are compared: the kind of scaling, empty if not stated, and the unit."""
    scaling: str = "" if pd.isna(row["scaling"]) else str(row["scaling"])
    return scaling, str(row["throughput_unit"])


def _title(scaling: str) -> str:
    return f"{scaling.capitalize()} scaling" if scaling else "Scaling (strong or weak: not stated)"


def _best(rows: list[_Row]) -> _Row:
    return max(rows, key=lambda r: float(r["throughput"]))


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
        after = line[1]
        below = "may already be" if _unsure(after, least) else "is already"
        return [f"{text}the next size {below} below {least:.0%} parallel efficiency."]
    text += f"speed-up {_measured(row, 'speed_up', '{:.2f}')}{_over(row, unit)}, "
    text += f"parallel efficiency {_measured(row, 'efficiency', '{:.0%}')}"
    text += _doubt(row, least)
    if pd.notna(row["time_s"]):
        text += f", {row['time_s']:.4g} s and {row['node_hours']:.3g} "
        text += f"node-hours per {row['time_of']}"
    return [f"{text}."]


def _over(row: _Row, unit: str) -> str:
    """The base of a speed-up, where it is not one rank."""
    base = row["base_world_size"]
    return f" over {counted_ranks(int(base), unit)}" if pd.notna(base) and base > 1 else ""


def _measured(row: _Row, name: str, form: str) -> str:
    """A value with its interval and the interval's confidence; the baseline has none."""
    text, low, high = say(row[name], form), row[f"{name}_low"], row[f"{name}_high"]
    if pd.isna(low) or low == high:
        return text
    share = f"{row['confidence_share']:.0%}"
    return f"{text} [{share}: {say(low, form)} to {say(high, form)}]"


def _unsure(row: _Row, least: float) -> bool:
    """Whether the efficiency may be on the other side of the threshold; so without repeats."""
    low, high = row["efficiency_low"], row["efficiency_high"]
    return bool(pd.isna(low) or low <= least <= high)


def _doubt(row: _Row, least: float) -> str:
    if not _unsure(row, least):
        return ""
    if pd.isna(row["efficiency_low"]):
        return " (uncertain: without repeats there is no interval)"
    return f" (uncertain: the interval includes {least:.0%})"


def _limits(line: list[_Row], unit: str, least: float) -> list[str]:
    """Where the efficiency of a series falls below the threshold, and why; what is above ideal."""
    name, first = line[0]["series"], line[0]
    if pd.isna(first["efficiency"]):
        return [f"{name}: {first['note']}."]
    over = [r for r in line if r["efficiency"] > _SUPERLINEAR]
    said = [_superlinear(over[-1], unit)] if over else []
    below = next((r for r in line if r["efficiency"] < least), None)
    if below:
        again = [r for r in line[line.index(below) + 1 :] if r["efficiency"] >= least]
        verb = "seems to fall" if _unsure(below, least) else "falls"
        text = (
            f"{name} {verb} below {least:.0%} parallel efficiency at {_size(below, unit)}: "
            f"{_measured(below, 'efficiency', '{:.1%}')}{_doubt(below, least)}{below['why']}."
        )
        if again:
            sizes = " and ".join(_size(r, unit) for r in again)
            text += f" At {sizes} it is measured at {least:.0%} or above again."
        return [text, *said]
    if len(line) < 2:
        return [f"{name} was measured at {_size(first, unit)} only."]
    unsure = [r for r in line[1:] if _unsure(r, least)]
    row = unsure[0] if unsure else line[-1]
    where = "" if row is line[-1] else f" (at {_size(row, unit)})"
    text = (
        f"{name} {'seems to have' if unsure else 'has'} at least {least:.0%} parallel efficiency "
        f"up to the largest measured size, {_size(line[-1], unit)}: "
        f"{_measured(row, 'efficiency', '{:.1%}')}{where}{_doubt(row, least)}."
    )
    return [text, *said]


def _superlinear(row: _Row, unit: str) -> str:
    base = counted_ranks(int(row["base_world_size"]), unit)
    return (
        f"{row['series']} is measured at {row['efficiency']:.0%} of ideal scaling on "
        f"{_size(row, unit)}. Usual reasons for more than 100%: slow runs on {base}, the baseline, "
        "or data that fit into the caches or the memory of more ranks only."
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
