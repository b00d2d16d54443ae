"""The conclusions of a study: the fastest strategy, how far it scales, what size to request."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.above_ideal import above_ideal
from jobkit.analysis.findings.asked import fewest_nodes, size_to_request
from jobkit.analysis.findings.breakdowns import causes
from jobkit.analysis.findings.disturbed import shared_nodes
from jobkit.analysis.findings.fastest import not_told_apart
from jobkit.analysis.findings.forecast import SOURCES, Forecast
from jobkit.analysis.findings.idle_gpus import energy, idle_gpus
from jobkit.analysis.findings.learned import learned, memory_needed
from jobkit.analysis.findings.outlying import outlying
from jobkit.analysis.findings.repeats import more_repeats
from jobkit.analysis.findings.sources import inferred_work
from jobkit.analysis.tables.comparable import mixed
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import computing, counted_ranks, per_second, rounded, say

LEAST = 0.8  # the parallel efficiency that a size to request must have
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
        said += _of_scaling(results, own, unit, least)
    said[1:1] = [*shared_nodes(results), *outlying(results)]
    said += above_ideal(results.scaling, unit)
    said += [line for f in forecasts for line in _beyond(f, unit)]
    said += [*learned(results, unit), *memory_needed(results, unit), *inferred_work(results)]
    said += [*idle_gpus(results, unit), *energy(results, unit)]
    return [*mixed(results.runs), *said, _runs(results)]


def _of_scaling(results: Results, rows: list[_Row], unit: str, least: float) -> list[str]:
    """The best series of one kind of scaling, and what to ask for; then each series' limit."""
    best, asked = _best(rows), size_to_request(rows, least)
    alike = not_told_apart(results, best, _comparable(rows), unit)
    faster = any(r["throughput"] > best["throughput"] for r in rows)
    among = "of the series that can be compared " if faster else ""
    line = (
        f"{_title(_kind(best)[0])}: the fastest {among}is {best['series']} on {_size(best, unit)}, "
        f"with {rounded(best['throughput'])} {per_second(best['throughput_unit'])}"
    )
    line += f"; not told apart from {alike} at 95% confidence." if alike else "."
    names: list[str] = list(dict.fromkeys(r["series"] for r in (best, *rows)))
    series = (asked or best)["series"]
    shown = names if len(names) <= _MANY else [*dict.fromkeys([names[0], series])]
    limits = [
        text
        for n in shown
        for text in _of_series([r for r in rows if r["series"] == n], unit, least)
    ]
    if len(shown) < len(names):
        limits.append(f"For the other {len(names) - len(shown)} series, see the table.")
    repeats = more_repeats(results, series, least, unit)
    return list(dict.fromkeys([line, *_ask(rows, best, asked, unit, least), *repeats, *limits]))


def _kind(row: _Row) -> tuple[str, str]:
    """What rows share that are compared: the kind of scaling, empty if not stated, and the unit."""
    scaling: str = "" if pd.isna(row["scaling"]) else str(row["scaling"])
    return scaling, str(row["throughput_unit"])


def _title(scaling: str) -> str:
    return f"{scaling.capitalize()} scaling" if scaling else "Scaling (strong or weak: not stated)"


def _comparable(rows: list[_Row]) -> list[_Row]:
    """Those of series whose runs may be compared, where there are any."""
    return [r for r in rows if pd.notna(r["efficiency"])] or rows


def _best(rows: list[_Row]) -> _Row:
    return max(_comparable(rows), key=lambda r: float(r["throughput"]))


def _ask(rows: list[_Row], best: _Row, row: _Row | None, unit: str, least: float) -> list[str]:
    """What size to request, in words. row: of size_to_request."""
    if row is None:
        alone = [r for r in rows if r["series"] == best["series"]]
        return [] if pd.isna(best["efficiency"]) else _one_size(alone)  # its note says why
    line = fewest_nodes([r for r in rows if r["series"] == row["series"]])
    text = f"Request {_size(row, unit)} with {row['series']}: "
    if row["world_size"] == line[0]["world_size"]:
        after = next(r for r in line if r["world_size"] > row["world_size"])
        below = "may already be" if _unsure(after, least) else "is already"
        text += f"the next size measured, {_size(after, unit)}, {below} below {least:.0%} "
        return [f"{text}parallel efficiency."]
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


def _of_series(rows: list[_Row], unit: str, least: float) -> list[str]:
    """Where the efficiency of a series, on the fewest nodes, falls below the threshold, and why."""
    line = fewest_nodes(rows)
    name, first = line[0]["series"], line[0]
    if pd.isna(first["efficiency"]):
        return [f"{name}: {first['note']}."]
    below = next((r for r in line if r["efficiency"] < least), None)
    if below:
        verb = "seems to fall" if _unsure(below, least) else "falls"
        text = (
            f"{name} {verb} below {least:.0%} parallel efficiency at {_size(below, unit)}: "
            f"{_measured(below, 'efficiency', '{:.1%}')}{_relative(below, unit)}"
            f"{_doubt(below, least)}{below['why']}."
        )
        return [text]
    if len(line) < 2:
        return _one_size(rows)
    last = line[-1]
    unsure = next((r for r in line[:0:-1] if _unsure(r, least)), None)
    text = (
        f"{name} {'seems to have' if unsure else 'has'} at least {least:.0%} parallel efficiency "
        f"up to the largest measured size, {_size(last, unit)}: "
        f"{_measured(last, 'efficiency', '{:.1%}')}{_relative(last, unit)}"
        f"{_doubt(unsure or last, least)}."
    )
    return [text]


def _one_size(line: list[_Row]) -> list[str]:
    at = "one size" if len(line) == 1 else "one number of ranks"
    return [f"{line[0]['series']} was measured at {at} only: its scaling is unknown."]


def _relative(row: _Row, unit: str) -> str:
    """The base of an efficiency, where it is not one rank."""
    base = row["base_world_size"]
    return f" relative to {counted_ranks(int(base), unit)}" if base > 1 else ""


def _beyond(one: Forecast, unit: str) -> list[str]:
    """The forecast for the largest size, what it does not know first; why others have none."""
    said = [f"No forecast of {why}." for why in one.reasons]
    if not one.sizes:
        return said
    ranks = one.sizes[-1]
    made = one.at(ranks)
    caution = f"{one.caution[0].upper()}{one.caution[1:]}. " if one.caution else ""
    base = counted_ranks(one.base.world_size or 1, unit)
    text = f"{caution}Forecast, not measured: {one.series} on {counted_ranks(ranks, unit)}: "
    text += f"speed-up {made.speed_up[0]:.3g} over {base}, {made.interval} "
    text += f"({SOURCES[made.law]})."
    return [text, *said]


def _runs(results: Results) -> str:
    bad = results.runs["status"][results.runs["status"] != "ok"].value_counts()
    total = len(results.runs)
    runs = "runs" if results.paths.given_logs.exists() else "planned runs"
    if bad.empty:
        return f"All {total} {runs} are ok." if total > 1 else f"The one {runs[:-1]} is ok."
    others = ", ".join(f"{n} {status}" for status, n in sorted(bad.items()))
    ok = total - int(bad.sum())
    return f"{ok} of {total} {runs} {'is' if ok == 1 else 'are'} ok; {others}."


def _size(row: _Row, unit: str) -> str:
    """How many GPUs and, where there are several nodes, on how many nodes."""
    on = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
    return f"{counted_ranks(computing(row, unit), unit)}{on}"
