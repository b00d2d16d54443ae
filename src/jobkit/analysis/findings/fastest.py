"""The fastest size of a study, and the sizes of any series that no test tells apart from it."""

from collections.abc import Sequence
from typing import Any

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.scaling import alike
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import pool
from jobkit.analysis.tables.text import computing, counted_ranks

_SHOWN = 6  # sizes
_Row = dict[str, Any]


def not_told_apart(results: Results, best: _Row, rows: Sequence[_Row], unit: str) -> str:
    """The sizes among rows that may be as fast as the best one, in words; empty without repeats.

    One at the best one's size by its series alone.
    """
    shared = pool([s.rates for s in results.sizes])
    if shared is None:
        return ""
    places = {place(row) for row in rows}
    own = next(s for s in results.sizes if of_size(s) == place(best))
    others = [s for s in results.sizes if of_size(s) in places and s is not own]
    found = [_named(s, own, unit) for s in others if alike(own, s, shared)]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{'; '.join(found[:_SHOWN])}{more}"


def place(row: _Row) -> tuple[Any, ...]:
    """What a row of scaling.csv is of, as of_size says it of a Size."""
    return row["series"], row["nodes"], row["ranks_per_node"]


def of_size(size: Size) -> tuple[Any, ...]:
    """Series, nodes and ranks per node."""
    return size.series, size.nodes, size.ranks_per_node


def _named(size: Size, best: Size, unit: str) -> str:
    if (size.nodes, size.ranks_per_node) == (best.nodes, best.ranks_per_node):
        return size.series
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    return f"{size.series} on {counted_ranks(computing(vars(size), unit), unit)}{on}"
