"""Efficiencies far above ideal scaling: a sentence that names them, and where they come from."""

from typing import Any

import pandas as pd

from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import computing, counted_ranks

REMARKED = 1.05  # an efficiency above this is remarked
_BASELINE = 1.5  # above this the baseline is more likely wrong than the size
_SHOWN = 5  # series
_USED = ["series", "world_size", "devices", "nodes", "base_world_size"]
_USED += ["efficiency", "efficiency_low"]


def above_ideal(scaling: pd.DataFrame, unit: str) -> list[str]:
    """A sentence on the series with an efficiency above 105 %, each with its highest.

    scaling: as scaling.scaling_table makes it. unit: GPUs, processes (ranks), or ranks. Empty where
    there is none.
    """
    rows = records(scaling[_USED])
    over = [row for row in rows if pd.notna(row["efficiency"]) and row["efficiency"] > REMARKED]
    if not over:
        return []
    of_series: dict[str, list[dict[str, Any]]] = {}
    for row in over:
        of_series.setdefault(row["series"], []).append(row)
    named = [_highest(rows, unit) for rows in of_series.values()]
    more = f"; {len(named) - _SHOWN} more series are above 105%" if len(named) > _SHOWN else ""
    bases = sorted({int(row["base_world_size"]) for row in over})
    base = " or ".join(counted_ranks(n, unit) for n in bases)
    # Without repeats nothing says how much is chance.
    chance = any(pd.notna(r["efficiency_low"]) and r["efficiency_low"] <= 1 for r in over)
    text = (
        f"{'; '.join(named[:_SHOWN])}{more}. Usual reasons for more than 100%: "
        f"{'chance (an interval includes 100%), ' * chance}slow runs on {base}, the baseline, or "
        "data that fit into the caches or the memory of more ranks only."
    )
    if max(row["efficiency"] for row in over) > _BASELINE:
        text += f" More than {_BASELINE:.0%} points to the baseline: repeat {base} first."
    return [text]


def _highest(rows: list[dict[str, Any]], unit: str) -> str:
    """The highest efficiency of a series, and the size where it was measured."""
    row = max(rows, key=lambda r: float(r["efficiency"]))
    on = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
    size = f"{counted_ranks(computing(row, unit), unit)}{on}"
    most = f", the most of {len(rows)} sizes above 105%" if len(rows) > 1 else ""
    return (
        f"{row['series']} is measured at {row['efficiency']:.0%} of ideal scaling on {size}{most}"
    )
