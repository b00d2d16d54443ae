"""What size to request: the largest that is efficient enough, of the series fastest there."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

_Row = dict[str, Any]


def size_to_request(rows: Sequence[_Row], least: float) -> _Row | None:
    """Of each series its largest efficient size; the fastest of these. None where there is none.

    rows: of one kind of scaling, small sizes first. The efficiency has to be least at every size
    up to it, or beyond a dip be above least with its interval. Efficiency is relative to a series'
    own smallest size: a size does not count where another series is faster on no more than it has.
    """
    found: list[_Row] = []
    for name in dict.fromkeys(row["series"] for row in rows):
        line = fewest_nodes([r for r in rows if r["series"] == name])
        if not pd.isna(line[0]["efficiency"]) and len(line) > 1:
            found.append(_largest(line, least))
    sound = [r for r in rows if not pd.isna(r["efficiency"])]
    found = [row for row in found if not any(_is_faster(other, row) for other in sound)]
    return max(found, key=lambda r: float(r["throughput"]), default=None)


def _is_faster(other: _Row, row: _Row) -> bool:
    """Whether another series is faster on no more GPUs and nodes, by the intervals if known."""
    more = any(other[name] > row[name] for name in ("devices", "nodes"))
    if more or other["series"] == row["series"]:
        return False
    ends = other["throughput_low"], row["throughput_high"]
    low, high = (other["throughput"], row["throughput"]) if any(map(pd.isna, ends)) else ends
    return bool(low > high)


def fewest_nodes(rows: Sequence[_Row]) -> list[_Row]:
    """The sizes of a series; of those with as many ranks, the one on the fewest nodes."""
    found: dict[int, _Row] = {}
    for row in rows:  # few nodes come first
        found.setdefault(row["world_size"], row)
    return list(found.values())


def _largest(line: Sequence[_Row], least: float) -> _Row:
    """The smallest size at the least: it is the base of the efficiency."""
    below = next((i for i, r in enumerate(line) if r["efficiency"] < least), len(line))
    return [
        row
        for i, row in enumerate(line)
        if i < below or (pd.notna(row["efficiency_low"]) and row["efficiency_low"] > least)
    ][-1]
