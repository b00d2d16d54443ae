"""How many of a study's comparisons differ, and how many chance alone would give."""

from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.tables.frames import records


def by_chance(results: Results) -> list[str]:
    """A sentence on the comparisons of a study with repeats; empty without any.

    Compared are two series at one size, and a size with the one before in its series.
    """
    if results.scaling["spread_from"].isna().all():
        return []
    pairs = alike = 0.0
    for row in records(results.scaling):
        if pd.isna(row["throughput"]):
            continue
        series, size = _compared(results, row)
        pairs += series / 2 + size  # a pair of series counts half at each of them
        text = row["not_distinguishable_from"]
        names = [] if pd.isna(text) else str(text).split("; ")
        before = sum(name.endswith((" rank", " ranks")) for name in names)
        alike += (len(names) - before) / 2 + before
    if pairs < 2:
        return []
    text = (
        f"{pairs - alike:.0f} of {pairs:.0f} comparisons (of series at one size, of neighbouring "
        f"sizes in one series) differ at {CONFIDENCE:.0%} confidence: were all equal, chance alone "
        f"would give about {pairs * (1 - CONFIDENCE):.1f}."
    )
    return [text]


def _equal(column: pd.Series, value: Any) -> pd.Series:
    """Where a column has the value; scaling may be stated nowhere."""
    return column.isna() if pd.isna(value) else (column == value).fillna(False)


def _compared(results: Results, row: dict[str, Any]) -> tuple[int, bool]:
    """With how many series a size is compared, and whether there is a smaller size."""
    table = results.scaling[results.scaling["throughput"].notna()]
    place = [_equal(table[k], row[k]) for k in ("scaling", "nodes", "ranks_per_node")]
    same = table[place[0] & place[1] & place[2]]
    own = table[table["series"] == row["series"]]
    return len(same) - 1, bool((own["world_size"] < row["world_size"]).any())
